"""Estimate a judge's noise and position bias from groups that were scored twice. Pure.

Scores are comparable within a group only, so what all answers of a group share says nothing of
noise: the differences between the two scorings are centred within the group, which costs one degree
of freedom. A difference has the noise of two scores, hence the factor 2:

    variance = sum over groups and answers of (difference - group's mean difference)^2
               / (2 * sum over groups of (answers - 1))

That is the noise of the score that is used, the mean over the passes, with whatever the order shown
adds to it: the two scorings draw their orders independently. It is not `answer.disagreement`, which
compares passes of one scoring: one moment, and an order with its reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul

from ingest.noise.figures import Figure, mean_figure, root_figure
from ingest.noise.passes import Passes

Parts = list[tuple[float, float]]
"""(numerator, denominator) of each group, for `ingest.noise.figures`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    """A group that was scored twice, by the same judge with the same rubric and passes."""

    first: Passes
    again: Passes

    @property
    def size(self) -> int:
        """Number of distinct answers."""
        return len(self.first[0].scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the groups of one window say of a judge. Score units: 0..1."""

    groups: int
    answers: int
    """Distinct answers of these groups."""
    sd: Figure
    """Standard deviation of the noise of a score, which is the mean over its passes."""
    pass_sd: float
    """The same of a single pass."""
    slope: Figure
    """What the last position gets above the first, by a straight line over the positions."""
    first_minus_last: Figure
    """What the first position gets above the last, by the answers at these two alone."""
    shift: Figure
    """Mean score of the second scoring minus that of the first: 0 for a judge that stays the
    same."""
    flips: Figure
    """Share of the pairs of answers that the two scorings put in opposite order, 0..1."""


def usable(one: Twice) -> bool:
    """Tell whether both scorings are of the same answers, two or more, in as many passes."""
    passes = (*one.first, *one.again)
    sizes = {len(each.scores) for each in passes} | {len(each.order) for each in passes}
    return len(one.first) == len(one.again) > 0 and len(sizes) == 1 and one.size >= 2


def estimate(groups: Sequence[Twice]) -> Estimate | None:
    """Estimate from `usable` groups. Returns: None with fewer than two of them."""
    means = [(_means(one.first), _means(one.again)) for one in groups]
    sd = root_figure([_squares(*pair) for pair in means])
    singles = root_figure([_pass_squares(one) for one in groups])
    shift = mean_figure([_shift(*pair) for pair in means])
    flips = mean_figure([_flips(*pair) for pair in means])
    ends = mean_figure([_first_minus_last(*each) for each in zip(groups, means, strict=True)])
    # A group that both scorings showed in one order alone says nothing of positions.
    slope = mean_figure([_slope(one) for one in groups])
    if sd is None or singles is None or shift is None or flips is None or ends is None:
        return None
    return Estimate(
        groups=len(groups),
        answers=sum(one.size for one in groups),
        sd=sd,
        pass_sd=singles.value,
        slope=slope or Figure(value=0.0, error=1.0, low=-1.0, high=1.0),
        first_minus_last=ends,
        shift=shift,
        flips=flips,
    )


def _means(passes: Passes) -> list[float]:
    """[D] mean score of each distinct answer over the passes."""
    rows = [one.scores for one in passes]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _squares(first: Sequence[float], again: Sequence[float]) -> tuple[float, float]:
    apart = [b - a for a, b in zip(first, again, strict=True)]
    mean = sum(apart) / len(apart)
    return sum((one - mean) ** 2 for one in apart), 2.0 * (len(apart) - 1)


def _pass_squares(one: Twice) -> tuple[float, float]:
    found = [_squares(a.scores, b.scores) for a, b in zip(one.first, one.again, strict=True)]
    return sum(part for part, _ in found), sum(whole for _, whole in found)


def _shift(first: Sequence[float], again: Sequence[float]) -> tuple[float, float]:
    return (sum(again) - sum(first)) / len(first), 1.0


def _flips(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    pairs = list(combinations(range(len(a)), 2))
    return sum((a[i] - a[j]) * (b[i] - b[j]) < 0 for i, j in pairs), len(pairs)


def _first_minus_last(
    one: Twice, means: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float]:
    """Compare each pass with the other scoring, whose orders are independent of its own.

    means: of each answer in the first scoring and in the second.
    """
    total = 0.0
    for passes, expected in ((one.first, means[1]), (one.again, means[0])):
        for each in passes:
            first, last = each.order[0], each.order[-1]
            total += each.scores[first] - expected[first] - each.scores[last] + expected[last]
    return total, len(one.first) + len(one.again)


def _slope(one: Twice) -> tuple[float, float]:
    """Regress score on position, with an effect for each answer and one for each pass taken out.

    Position is 0 for the first and 1 for the last, so that groups of all sizes compare.
    """
    passes = (*one.first, *one.again)
    places = [[0.0] * one.size for _ in passes]
    for row, each in zip(places, passes, strict=True):
        for position, answer in enumerate(each.order):
            row[answer] = position / (one.size - 1)
    xs = _without_effects(places)
    ys = _without_effects([each.scores for each in passes])
    flat_x = [x for row in xs for x in row]
    flat_y = [y for row in ys for y in row]
    return sum(map(mul, flat_x, flat_y)), sum(x * x for x in flat_x)


def _without_effects(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Subtract from each value the means of its row and its column, and add the mean of all."""
    by_row = [sum(row) / len(row) for row in rows]
    by_column = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    whole = sum(by_row) / len(rows)
    return [
        [value - by_row[r] - by_column[c] + whole for c, value in enumerate(row)]
        for r, row in enumerate(rows)
    ]
