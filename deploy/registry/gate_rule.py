"""Arithmetic of judged prompts: what one comparison is, and the quick rule of the gate. Pure.

One comparison is one prompt: the mean judge score of the candidate's answers minus the mean score
of the champion's, and minus the anchor's. All are scored in one blind group, because RULER's scores
cannot be compared across groups. What the comparisons prove is `deploy.evidence.quality`, fed in
the order in which the prompts were drawn.

`judge_gate` is the rule of `canary.promote_on = "quick"`: the mean of the differences decides. It
states no level; its bootstrap interval is only shown.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.evidence.quality import Fault, Group, Limits, Quality, add_group
from sidecar.plurals import counted
from sidecar.settings import Canary as CanarySettings

RESAMPLES = 2_000
LEVEL = 0.95
_MOST_DIGITS = 18
"""Behind the point; two floats near 0.01 differ in the first 18."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of one held-out prompt."""

    difference: float | None
    """Mean score of the candidate minus the champion's, -1..1; None: no usable score."""
    anchor_difference: float | None = None
    """The same for the anchor; None: no usable score, or no anchor was asked."""
    fault: Fault | None = None
    """Whose answers kept the judge from scoring it; None when it is scored."""
    flaws: Mapping[str, float] = field(default_factory=dict)
    """Kind of flaw -> the candidate's share of such answers minus the champion's, -1..1."""
    place: int = 0
    """Its number in the order in which the canary's prompts were drawn."""
    candidate_answers: int = 0
    candidate_short: int = 0
    """Number of the candidate's answers that hit the token limit or are empty."""
    champion_answers: int = 0
    champion_short: int = 0
    judge: str = ""
    """Who scored it, as `judge_name`; empty: not known, or nobody was asked."""
    disagreement: float | None = None
    """Mean absolute difference between two passes' scores, over the answers; None after one."""
    flipped: float | None = None
    """Share of the pairs of answers that two passes put in opposite order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """Sums over the comparisons, and whether the candidate passes."""

    passed: bool
    reason: str
    scored: int
    set_aside: int
    mean_difference: float | None
    low: float | None
    high: float | None
    """Bounds of the 95% bootstrap interval of the mean difference."""
    candidate_short_share: float
    champion_short_share: float
    judges: tuple[str, ...] = ()
    """Who scored the comparisons, as `judge_name`; more than one when the settings changed."""
    disagreement: float | None = None
    """How far the judge's passes differ, mean over the comparisons with two passes or more."""
    flipped_pairs: float | None = None
    """Share of the pairs of answers that two passes put in opposite order, mean over the same."""


def judge_name(model: str, rubric_hash: str) -> str:
    """Return how evidence and lineage name a judge with its rubric."""
    return f"{model} rubric {rubric_hash}"


def mean_difference(candidate: Sequence[float], champion: Sequence[float]) -> float:
    """Return the mean of `candidate` minus the mean of `champion`; each holds a score or more."""
    return sum(candidate) / len(candidate) - sum(champion) / len(champion)


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the 95% percentile interval of the mean, by resampling `values` with replacement.

    values: at least one. Deterministic for given values and seed.
    """
    rng = random.Random(seed)
    count = len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - LEVEL) / 2)
    return means[tail], means[RESAMPLES - 1 - tail]


def quality_of(
    comparisons: Iterable[Comparison],
    limits: Limits,
    *,
    anchored: bool,
    start: Quality | None = None,
) -> Quality:
    """Return what comparisons say, read in the order given.

    anchored: the canary's anchor is an adapter of its own. If not, the champion is the anchor; if
    so, a comparison without a score of the anchor says nothing of it. start: what earlier ones
    said.
    """
    quality = Quality() if start is None else start
    for one in comparisons:
        group = Group(
            champion=one.difference,
            anchor=one.anchor_difference if anchored else one.difference,
            fault=one.fault or (None if one.difference is not None else "unknown"),
            flaws=one.flaws,
        )
        quality = add_group(quality, group, limits)
    return quality


def judge_gate(
    comparisons: Sequence[Comparison], rules: CanarySettings, *, seed: int
) -> GateVerdict:
    """Judge by the comparisons made so far. The caller decides whether they are enough."""
    differences = [c.difference for c in comparisons if c.difference is not None]
    candidate_short = _share(
        sum(c.candidate_short for c in comparisons), sum(c.candidate_answers for c in comparisons)
    )
    champion_short = _share(
        sum(c.champion_short for c in comparisons), sum(c.champion_answers for c in comparisons)
    )
    scored = [c for c in comparisons if c.difference is not None]
    mean = sum(differences) / len(differences) if differences else None
    low, high = bootstrap_interval(differences, seed=seed) if differences else (None, None)
    passed, reason = _rule(mean, len(differences), candidate_short, champion_short, rules)
    return GateVerdict(
        passed=passed,
        reason=reason,
        scored=len(differences),
        set_aside=len(comparisons) - len(differences),
        mean_difference=mean,
        low=low,
        high=high,
        candidate_short_share=candidate_short,
        champion_short_share=champion_short,
        judges=tuple(sorted({one.judge for one in scored if one.judge})),
        disagreement=_mean([one.disagreement for one in scored]),
        flipped_pairs=_mean([one.flipped for one in scored]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _rule(
    mean: float | None,
    prompts: int,
    candidate_short: float,
    champion_short: float,
    rules: CanarySettings,
) -> tuple[bool, str]:
    if mean is None:
        return False, "gate: no prompt is scored yet"
    if candidate_short - champion_short > rules.max_truncated_excess:
        return False, (
            f"gate: {candidate_short:.0%} of the candidate's answers were cut short or empty, "
            f"{champion_short:.0%} of the champion's: over by more than "
            f"{rules.max_truncated_excess:.0%}"
        )
    judged, margin = _apart(mean, -rules.gate_margin)
    result = f"gate: judged {judged} to the champion on {counted(prompts, 'held-out prompt')}"
    if mean > -rules.gate_margin:
        return True, f"{result}, above the margin of {margin}"
    return False, f"{result}, not above the margin of {margin}"


def _apart(one: float, other: float) -> tuple[str, str]:
    """Return both with three digits, or with as many as it takes to see that they differ."""
    texts = f"{one:+.3f}", f"{other:+.3f}"
    digits = 4
    while one != other and texts[0] == texts[1] and digits < _MOST_DIGITS:
        texts = f"{one:+.{digits}f}", f"{other:+.{digits}f}"
        digits += 1
    return texts
