"""The figures of a calibration: agreement with a known order, position bias and chance. Pure."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

from ingest.ruler.ruler import measure_disagreement, merge_identical

# Agreement of scores with a known order, and intervals over groups. Pure.

RESAMPLES = 2_000
LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure over groups and its 95% bootstrap interval."""

    value: float
    low: float
    high: float
    groups: int
    """How many groups it comes from."""


def kendall_tau(known: Sequence[float], judged: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two rows of scores: 1 same order, 0 no relation, -1 reverse.

    Returns: None when `known` has no order. A row `judged` that is all ties says nothing: 0.
    Source: Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945).
    """
    concordance = known_apart = judged_apart = 0
    for i, j in combinations(range(len(known)), 2):
        a, b = _sign(known[i] - known[j]), _sign(judged[i] - judged[j])
        concordance += a * b
        known_apart += abs(a)
        judged_apart += abs(b)
    if not known_apart:
        return None
    return concordance / math.sqrt(known_apart * judged_apart) if judged_apart else 0.0


def pairs_right(pairs: Sequence[tuple[int, int]], judged: Sequence[float]) -> float:
    """Count the pairs (better, worse) that the scores put right; a tie is half a pair."""
    return sum((1 + _sign(judged[better] - judged[worse])) / 2 for better, worse in pairs)


def over_groups(parts: Sequence[tuple[float, float]], *, seed: int) -> Interval | None:
    """Return the sum of numerators over the sum of denominators, with its interval.

    parts: [N] (numerator, denominator > 0) of each group; groups are what is resampled, because the
        answers of one group are not independent.
    seed: of the resampling; the same seed gives the same interval.
    Returns: None without groups.
    """
    if not parts:
        return None
    rng = random.Random(seed)
    draws = sorted(_ratio(rng.choices(parts, k=len(parts))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - LEVEL) / 2)
    return Interval(
        value=_ratio(parts), low=draws[tail], high=draws[RESAMPLES - 1 - tail], groups=len(parts)
    )


def _ratio(parts: Sequence[tuple[float, float]]) -> float:
    return sum(part for part, _ in parts) / sum(whole for _, whole in parts)


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


# Groups whose true order is known, and what a judge made of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One answer, with what is known of it."""

    kind: str
    """What the answer does well or badly (`hallucinated`); empty when the file does not say."""
    message: Mapping[str, Any]
    """The assistant message. Any: JSON."""
    score: float | None
    """Known score on any scale, more is better; None when only preferences are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroup:
    """Answers to one prompt whose order, or part of it, is known."""

    group_id: str
    task: str
    context: tuple[Mapping[str, Any], ...]
    """The messages that all answers follow."""
    tools: tuple[Mapping[str, Any], ...]
    candidates: tuple[Candidate, ...]
    """[G] G >= 2."""
    preferences: tuple[tuple[int, int], ...]
    """(index of the better, index of the worse) where the file knows no scores."""

    @property
    def scores(self) -> tuple[float, ...] | None:
        """[G] known scores; None when only preferences are known."""
        known = tuple(one.score for one in self.candidates if one.score is not None)
        return known if len(known) == len(self.candidates) else None

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(index of the better, index of the worse) of all pairs whose order is known."""
        scores = self.scores
        if scores is None:
            return self.preferences
        return tuple(
            (i, j) for i, j in permutations(range(len(scores)), 2) if scores[i] > scores[j]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The scores of one order in which a group was shown."""

    scores: tuple[float, ...]
    """[G] 0..1, in the order of the group's candidates."""
    positions: tuple[int, ...]
    """[G] where each candidate was shown, from 0; identical candidates are shown once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One group judged once, as the product judges it: by some passes, each in another order."""

    group: KnownGroup
    repeat: int
    """Which of the repeated runs, from 0."""
    passes: tuple[Pass, ...]
    """In pairs: each second one shows the reverse order of the one before. Empty: it failed."""
    failure: str | None = None
    """Reason in the terms of `answer_group.reason`; None when there are scores."""
    detail: str = ""
    """The error of a failed run."""
    calls: int = 0
    """Answered calls, unusable ones too."""
    unusable: int = 0
    """Answered calls whose scores could not be used."""
    replayed: int = 0
    """Answered calls whose reply was paid for before and kept."""
    tokens: int = 0
    """Tokens of prompts and replies, as far as the provider reports them."""
    cost_usd: float | None = 0.0
    """None when a call has no known price."""
    seconds: float = 0.0
    """Sum of the times of its calls."""

    @property
    def scores(self) -> tuple[float, ...]:
        """[G] means over the passes: what the product would take.

        Rounded, so that equal means of other orders of summation are equal.
        """
        columns = zip(*(one.scores for one in self.passes), strict=True)
        return tuple(round(sum(column) / len(self.passes), 9) for column in columns)


# What a judge's scores owe to position and chance. Pure; nothing here knows the true order.

Parts = list[tuple[float, float]]
"""(numerator, denominator) of each group, for `over_groups`."""


def position_parts(by_group: Iterable[Sequence[Run]]) -> list[Parts]:
    """Return, for each position shown, the parts of the mean score above expectation."""
    found: list[Parts] = []
    for runs in by_group:
        rows = _above_expectation(runs)
        for position in range(len(rows[0]) if rows else 0):
            if position == len(found):
                found.append([])
            found[position].append((sum(row[position] for row in rows), len(rows)))
    return found


def first_minus_last_parts(by_group: Iterable[Sequence[Run]]) -> Parts:
    """Return the parts of the mean score above expectation at the first position minus the last."""
    parts: Parts = []
    for runs in by_group:
        rows = _above_expectation(runs)
        if rows:
            parts.append((sum(row[0] - row[-1] for row in rows), len(rows)))
    return parts


def flip_parts(by_group: Iterable[Sequence[Run]]) -> Parts:
    """Return the parts of the share of pairs whose order turns round when the order shown does.

    A pair that one of the two passes ties is compared, and is no flip.
    """
    parts: Parts = []
    for runs in by_group:
        compared = [
            measure_disagreement([one.scores for one in run.passes[k : k + 2]], ())
            for run in runs
            for k in range(0, len(run.passes), 2)
        ]
        flipped = [one.flipped for one in compared if one is not None]
        if flipped:
            parts.append((sum(flipped), len(flipped)))
    return parts


def repeat_parts(by_group: Iterable[Sequence[Run]]) -> Parts:
    """Return the parts of the mean tau-b between repeated runs of a group.

    A group that no run of a couple puts in any order is left out.
    """
    parts: Parts = []
    for runs in by_group:
        known: list[float] = []
        for a, b in combinations([run.scores for run in runs], 2):
            tau = kendall_tau(a, b)
            tau = kendall_tau(b, a) if tau is None else tau
            known += [] if tau is None else [tau]
        if known:
            parts.append((sum(known), len(known)))
    return parts


def noise_sd(by_group: Iterable[Sequence[Run]]) -> float | None:
    """Return the standard deviation of an answer's score between repeated runs, pooled.

    Returns: None when no group was judged twice. Divisor: repeats - 1.
    """
    squares = 0.0
    freedom = 0
    for runs in by_group:
        for column in zip(*(run.scores for run in runs), strict=True):
            mean = sum(column) / len(column)
            squares += sum((score - mean) ** 2 for score in column)
            freedom += len(column) - 1
    return math.sqrt(squares / freedom) if freedom else None


def _above_expectation(runs: Sequence[Run]) -> list[list[float]]:
    """Return, for each pass, the scores by position shown minus those to expect.

    Empty for a single pass: there is nothing to expect from. Identical answers share one position.
    """
    if sum(len(run.passes) for run in runs) < 2:
        return []
    rows = []
    for run in runs:
        others = [other.scores for other in runs if other is not run] or [run.scores]
        expected = [sum(column) / len(others) for column in zip(*others, strict=True)]
        for one in run.passes:
            off = [score - mean for score, mean in zip(one.scores, expected, strict=True)]
            shown = dict(zip(one.positions, off, strict=True))
            rows.append([shown[position] for position in sorted(shown)])
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Runs without scores, of one reason."""

    reason: str
    count: int
    example: str
    """The first error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One judge with one rubric. `None` in a figure: nothing to compute it from."""

    judge: str
    rubric: str
    rubric_hash: str
    runs: int
    """Groups times repeats."""
    scored: int
    """Runs with scores; all figures but the costs come from these."""
    failures: tuple[Failures, ...]
    unusable_replies: int
    """Replies that were refused; one retry shows the judge its error."""
    tau: Interval | None
    """Mean over groups of tau-b with the known scores."""
    pairs_right: Interval | None
    """Share of pairs of known order that the scores put right; a tie is half right."""
    first_minus_last: Interval | None
    """Mean score at the first position minus that at the last, of the same answers."""
    by_position: tuple[Interval, ...]
    """For each position, the mean score above what the same answers get elsewhere."""
    flips: Interval | None
    """Share of pairs whose order turns round when the order shown does."""
    repeat_tau: Interval | None
    """Mean tau-b between repeated runs of a group."""
    noise_sd: float | None
    """Standard deviation of an answer's score between repeated runs."""
    by_kind: dict[str, Interval]
    """`pairs_right` of the pairs whose worse answer is of this kind: which faults it sees."""
    by_task: dict[str, Interval]
    """`pairs_right` of the groups of this task."""
    replayed: int
    """Replies that were paid for before and kept: they cost nothing now."""
    cost_usd: float | None
    """Cost of all calls, failed runs too; None when a call has no known price."""
    usd_per_group: float | None
    """Cost of a run. This and the next two count all calls of the runs that were tried, without
    those of which a reply was replayed: they cost less than others would."""
    tokens_per_group: float | None
    seconds_per_group: float | None
    """Sum of the times of a run's calls, one after the other."""


def summarise(
    runs: Sequence[Run], *, judge: str, rubric: str, rubric_hash: str, seed: int
) -> Summary:
    """Sum up runs. seed: of the intervals."""
    scored = [run for run in runs if run.failure is None]
    asked = [run for run in runs if run.calls]
    tried = [run for run in asked if not run.replayed]
    by_group: dict[str, list[Run]] = {}
    for run in scored:
        by_group.setdefault(run.group.group_id, []).append(run)
    grouped = list(by_group.values())
    costs = [run.cost_usd for run in tried if run.cost_usd is not None]
    cost = sum(costs) if tried and len(costs) == len(tried) else None
    all_costs = [run.cost_usd for run in asked if run.cost_usd is not None]

    def interval(parts: Parts) -> Interval | None:
        return over_groups(parts, seed=seed)

    def intervals(parts: dict[str, Parts]) -> dict[str, Interval]:
        found = {name: interval(one) for name, one in sorted(parts.items())}
        return {name: one for name, one in found.items() if one is not None}

    kinds = {one.kind for run in scored for one in run.group.candidates} - {""}
    tasks = {run.group.task for run in scored} - {""}
    places = [interval(parts) for parts in position_parts(grouped)]
    return Summary(
        judge=judge,
        rubric=rubric,
        rubric_hash=rubric_hash,
        runs=len(runs),
        scored=len(scored),
        failures=_failures(runs),
        unusable_replies=sum(run.unusable for run in runs),
        tau=interval(_tau_parts(grouped)),
        pairs_right=interval(_pair_parts(grouped)),
        first_minus_last=interval(first_minus_last_parts(grouped)),
        by_position=tuple(one for one in places if one is not None),
        flips=interval(flip_parts(grouped)),
        repeat_tau=interval(repeat_parts(grouped)),
        noise_sd=noise_sd(grouped),
        by_kind=intervals({kind: _pair_parts(grouped, kind=kind) for kind in kinds}),
        by_task=intervals({task: _pair_parts(grouped, task=task) for task in tasks}),
        replayed=sum(run.replayed for run in asked),
        cost_usd=sum(all_costs) if asked and len(all_costs) == len(asked) else None,
        usd_per_group=cost / len(tried) if cost is not None else None,
        tokens_per_group=sum(run.tokens for run in tried) / len(tried) if tried else None,
        seconds_per_group=sum(run.seconds for run in tried) / len(tried) if tried else None,
    )


def _pair_parts(
    by_group: Iterable[Sequence[Run]], *, kind: str | None = None, task: str | None = None
) -> Parts:
    """kind: of the worse answer. task: of the group. None: any."""
    parts: Parts = []
    for runs in by_group:
        group = runs[0].group
        of_kind = (pair for pair in group.pairs if kind in (None, group.candidates[pair[1]].kind))
        if task in (None, group.task) and (pairs := list(of_kind)):
            right = sum(pairs_right(pairs, run.scores) for run in runs)
            parts.append((right, len(pairs) * len(runs)))
    return parts


def _tau_parts(by_group: Iterable[Sequence[Run]]) -> Parts:
    parts: Parts = []
    for runs in by_group:
        known = runs[0].group.scores
        taus = [kendall_tau(known, run.scores) for run in runs] if known is not None else []
        found = [tau for tau in taus if tau is not None]
        if found:
            # The mean of a group's runs is one value: each group counts once.
            parts.append((sum(found) / len(found), 1))
    return parts


def _failures(runs: Sequence[Run]) -> tuple[Failures, ...]:
    counts = Counter(run.failure for run in runs if run.failure is not None)
    first = {run.failure: run.detail for run in reversed(runs)}
    return tuple(
        Failures(reason=reason, count=count, example=first[reason])
        for reason, count in counts.most_common()
    )


# Leave out groups that say nothing about a judge: no order is known, or nothing differs. Pure.

EQUAL_SCORES = "all known scores are equal, so no order is known"
NO_PREFERENCES = "the list of preferences is empty, so no order is known"
IDENTICAL = "all candidates look the same to a judge"
SHOWN = 5
"""Ids of a reason that are named."""


def split_usable(groups: Sequence[KnownGroup]) -> tuple[list[KnownGroup], dict[str, list[str]]]:
    """Return the groups that can be judged and compared, and why the others cannot.

    Returns: (the usable groups, reason -> ids of the groups that it leaves out).
    """
    usable: list[KnownGroup] = []
    left_out: dict[str, list[str]] = {}
    for group in groups:
        why = _why_unusable(group)
        if why is None:
            usable.append(group)
        else:
            left_out.setdefault(why, []).append(group.group_id)
    return usable, left_out


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a line for each reason: how many groups, the first of them, and why."""
    for why, ids in left_out.items():
        named = ", ".join(ids[:SHOWN]) + (", ..." if len(ids) > SHOWN else "")
        yield f"{len(ids)} left out ({named}): {why}"


def _why_unusable(group: KnownGroup) -> str | None:
    messages = [one.message for one in group.candidates]
    if len(merge_identical(messages)[0]) < 2:
        return IDENTICAL
    if group.pairs:
        return None
    return NO_PREFERENCES if group.scores is None else EQUAL_SCORES
