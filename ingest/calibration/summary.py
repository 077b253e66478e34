"""Sum up the runs of one judge with one rubric. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ingest.calibration.agreement import Interval, kendall_tau, over_groups, pairs_right
from ingest.calibration.consistency import (
    Parts,
    first_minus_last_parts,
    flip_parts,
    noise_sd,
    position_parts,
    repeat_parts,
)
from ingest.calibration.records import KnownGroup, Run


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
        pairs_right=interval(_pair_parts(grouped, _every_pair)),
        first_minus_last=interval(first_minus_last_parts(grouped)),
        by_position=tuple(one for one in places if one is not None),
        flips=interval(flip_parts(grouped)),
        repeat_tau=interval(repeat_parts(grouped)),
        noise_sd=noise_sd(grouped),
        by_kind=intervals({kind: _pair_parts(grouped, _worse_is(kind)) for kind in kinds}),
        by_task=intervals({task: _pair_parts(grouped, _task_is(task)) for task in tasks}),
        replayed=sum(run.replayed for run in asked),
        cost_usd=sum(all_costs) if asked and len(all_costs) == len(asked) else None,
        usd_per_group=cost / len(tried) if cost is not None else None,
        tokens_per_group=sum(run.tokens for run in tried) / len(tried) if tried else None,
        seconds_per_group=sum(run.seconds for run in tried) / len(tried) if tried else None,
    )


Wanted = Callable[[KnownGroup, int], bool]
"""Whether a pair counts, by its group and the index of its worse answer."""


def _every_pair(_group: KnownGroup, _worse: int) -> bool:
    return True


def _worse_is(kind: str) -> Wanted:
    return lambda group, worse: group.candidates[worse].kind == kind


def _task_is(task: str) -> Wanted:
    return lambda group, _worse: group.task == task


def _pair_parts(by_group: Iterable[Sequence[Run]], wanted: Wanted) -> Parts:
    parts: Parts = []
    for runs in by_group:
        group = runs[0].group
        pairs = [pair for pair in group.pairs if wanted(group, pair[1])]
        if pairs:
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
