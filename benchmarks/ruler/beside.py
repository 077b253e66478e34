"""Compare what two sides made of the same groups. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from benchmarks.ruler.material import MadeGroup
from benchmarks.ruler.sides import Outcome
from ingest.calibration.figures import Interval, kendall_tau, over_groups

SEED = 13
APART = 0.011
"""A score that differs by more from what the judge meant is another answer's, or nobody's: half a
step of the judge for each of two passes, and the error of a float."""
ERRORS = 3.0
"""Standard errors on either side of a difference. Some forty differences are judged in one run:
with two errors one of them would fail by chance in most runs where both sides are equal, with three
in one run of twenty."""
Call = Mapping[str, Any]  # Any: JSON of the server's account


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One side under one condition."""

    groups: int
    unusable: float
    """Share of groups without scores."""
    wrong: float
    """Share of groups with scores in which some answer has not the score that the judge meant."""
    tau: Interval | None
    """Mean over groups with scores of Kendall's tau-b with the truth; a score that is no number
    gives no order to its pairs."""
    tau_of_all: float
    """The same over all groups, one without scores as 0."""
    first_bias: float | None
    """What the first answer of a group gets over its worth, more than the others do: the served
    answer stands there."""
    twins_apart: float | None
    """Share of pairs of equal answers with different scores; None: no such pairs."""
    calls: float
    """Judge calls a group; this and tokens are over all groups, usable or not."""
    prompt_tokens: float
    completion_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean over groups of our tau minus theirs, three standard errors below and above it."""

    value: float
    low: float
    high: float


def compare(
    made: Sequence[MadeGroup], outcomes: Sequence[Outcome], calls: Sequence[Call]
) -> Compared:
    """Sum one side up. calls: what the judge was asked by it."""
    usable = [
        (group, outcome.scores)
        for group, outcome in zip(made, outcomes, strict=True)
        if outcome.scores is not None
    ]
    meant = meant_scores(calls)
    taus = [tau for group, scores in usable if (tau := tau_of(group, scores)) is not None]
    twins = [apart for group, scores in usable for apart in _twins(group, scores)]
    firsts = [_first(group, scores) for group, scores in usable if all(map(math.isfinite, scores))]
    count = len(made)
    return Compared(
        groups=count,
        unusable=1 - len(usable) / count,
        wrong=sum(is_wrong(group, scores, meant) for group, scores in usable) / max(1, len(usable)),
        tau=over_groups([(tau, 1.0) for tau in taus], seed=SEED),
        tau_of_all=sum(taus) / count,
        first_bias=sum(firsts) / len(firsts) if firsts else None,
        twins_apart=sum(twins) / len(twins) if twins else None,
        calls=len(calls) / count,
        prompt_tokens=sum(call["prompt_tokens"] for call in calls) / count,
        completion_tokens=sum(call["completion_tokens"] for call in calls) / count,
    )


def difference(
    made: Sequence[MadeGroup], ours: Sequence[Outcome], theirs: Sequence[Outcome]
) -> Difference | None:
    """Compare our tau with theirs, over the groups that both have scores for.

    Returns: None when there are fewer than two.
    """
    apart = []
    for group, one, other in zip(made, ours, theirs, strict=True):
        if one.scores is None or other.scores is None:
            continue
        tau, their_tau = tau_of(group, one.scores), tau_of(group, other.scores)
        if tau is not None and their_tau is not None:
            apart.append(tau - their_tau)
    if len(apart) < 2:
        return None
    mean, error = fmean(apart), stdev(apart) / math.sqrt(len(apart))
    return Difference(value=mean, low=mean - ERRORS * error, high=mean + ERRORS * error)


def tau_of(made: MadeGroup, scores: Sequence[float]) -> float | None:
    """Return the tau-b of a group. NaN is neither more nor less than any score, so it is a tie."""
    return kendall_tau(made.truth, scores)


def meant_scores(calls: Sequence[Call]) -> dict[frozenset[str], list[tuple[str, float]]]:
    """Return what the judge meant for the answers of each group, by case.

    That is the mean over the orders in which it was asked, of the last attempt of each. A case that
    was shown twice in one prompt has two scores.
    """
    last: dict[frozenset[str], dict[tuple[str, ...], Sequence[float]]] = {}
    for call in calls:
        cases = tuple(call["cases"])
        last.setdefault(frozenset(cases), {})[cases] = call["meant"]
    found = {}
    for group, orders in last.items():
        by_order = [sorted(zip(cases, meant, strict=True)) for cases, meant in orders.items()]
        found[group] = [
            (same[0][0], sum(score for _, score in same) / len(same))
            for same in zip(*by_order, strict=True)
        ]
    return found


def is_wrong(
    made: MadeGroup,
    scores: Sequence[float],
    meant: Mapping[frozenset[str], Sequence[tuple[str, float]]],
) -> bool:
    """Tell whether some answer of a group got a score that the judge did not mean for it."""
    wanted = meant.get(frozenset(made.cases), ())
    return not all(
        any(case == one and abs(score - value) <= APART for one, value in wanted)
        for case, score in zip(made.cases, scores, strict=True)
    )


def _twins(made: MadeGroup, scores: Sequence[float]) -> list[bool]:
    return [
        scores[i] != scores[j]
        for i in range(len(scores))
        for j in range(i)
        if made.cases[i] == made.cases[j]
    ]


def _first(made: MadeGroup, scores: Sequence[float]) -> float:
    gained = [score - worth for score, worth in zip(scores, made.truth, strict=True)]
    others = gained[1:]
    return gained[0] - sum(others) / len(others)
