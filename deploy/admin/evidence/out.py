"""What a canary's decisions rest on, as the admin API shows it."""

from __future__ import annotations

from typing import Any

from deploy.admin.out import Out
from deploy.evidence.approval import Answer, Stage
from deploy.evidence.outside import MetricState, Mode, Outcome
from deploy.outside.telling import HookState
from deploy.records import Phase


class MetricOut(Out):
    """A number from outside that a canary is held to."""

    name: str
    mode: Mode
    outcome: Outcome
    """How the newest check ended. `error`: the provider gave no answer; `no_data`: it has none."""
    value: float | None
    min: float | None
    max: float | None
    at: float
    why: str
    failures: int
    """Failing checks in a row; at `fails_at` a guardrail rolls back and a signal holds."""
    fails_at: int
    errors: int
    """Errors in a row; at `errs_at` the ramp stands."""
    errs_at: int

    @classmethod
    def of(cls, name: str, state: MetricState) -> MetricOut | None:
        """None before the first check."""
        last = state.last
        if last is None:
            return None
        return cls(
            name=name,
            mode=state.mode,
            outcome=last.outcome,
            value=last.value,
            min=state.min,
            max=state.max,
            at=last.at,
            why=last.why,
            failures=state.failures,
            fails_at=state.fails_at,
            errors=state.errors,
            errs_at=state.errs_at,
        )


class ApprovalOut(Out):
    """A move that waits for the approval service, or did."""

    before: Stage
    since: float
    answer: Answer
    """`asked`: none yet; `error`: it could not be asked, or its answer was none."""
    reason: str
    at: float
    """When it last answered or failed to; 0: not yet."""
    asked: int
    """Calls so far."""


class HookOut(Out):
    """A web hook."""

    name: str
    tries: int
    """Tries of the next event that failed; 0: it works, or nothing has happened."""
    next_at: float | None
    """When it is tried again; null: at the next event."""
    delivered: int
    dead: int
    """Events that were given up: too many tries, or too old."""
    told_at: float | None
    error: str

    @classmethod
    def of(cls, name: str, state: HookState) -> HookOut:
        return cls(
            name=name,
            tries=state.tries,
            next_at=state.next_at or None,
            delivered=state.delivered,
            dead=state.dead,
            told_at=state.told_at,
            error=state.error,
        )


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
