"""What a canary's decisions rest on, as the admin API shows it."""

from __future__ import annotations

from typing import Any

from deploy.admin.out import Out
from deploy.records import Phase


class ComparisonOut(Out):
    """One judged prompt of a canary."""

    comparison_id: str
    exchange_id: str
    status: str
    difference: float | None
    judge_model: str | None
    """Null when the judge was not asked, and in comparisons of older versions."""
    rubric_hash: str | None
    disagreement: float | None
    """How far the judge's passes differ, mean over the answers; null after a single pass."""
    flipped_pairs: float | None
    """Share of the pairs of answers that two passes put in opposite order."""
    place: int | None
    """Its number in the order in which it counts; null in comparisons of older versions."""
    anchor_difference: float | None
    fault: str | None
    """Whose answers kept the judge from scoring it: candidate, champion or unknown."""
    answers: list[dict[str, Any]]


class EvidenceOut(Out):
    canary_id: str
    state: Phase
    evidence: dict[str, Any]
    comparisons_made: int
    """All of them; `comparisons` has the newest 200."""
    comparisons: list[ComparisonOut]
