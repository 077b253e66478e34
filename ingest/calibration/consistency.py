"""What a judge's scores owe to position and chance. Pure; nothing here knows the true order.

Position bias is measured on each answer against itself: its score at a position minus what the
judge gives the same answer in the other repeats of the group, where it stands at random positions.
So the quality of the answers, which is what they differ by most, is no part of it. Without other
repeats the mean of the run's own passes takes their place; that of an order and its reverse cannot
show a bias which is the same at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

from ingest.calibration.agreement import kendall_tau
from ingest.calibration.records import Run
from ingest.ruler.ruler import measure_disagreement

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
        taus = [_agreement(a.scores, b.scores) for a, b in combinations(runs, 2)]
        known = [tau for tau in taus if tau is not None]
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


def _agreement(a: Sequence[float], b: Sequence[float]) -> float | None:
    tau = kendall_tau(a, b)
    return kendall_tau(b, a) if tau is None else tau


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
