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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from statistics import NormalDist
from typing import Any

from ingest.records import ShownPass

# A figure over groups with its error and interval. Pure.

LEVEL = 0.95
"""Level of the intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure, its standard error, and its 95% interval."""

    value: float
    error: float
    low: float
    high: float


def ratio(parts: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the sum of numerators over the sum of denominators, and its standard error.

    parts: [N] (numerator, denominator >= 0) of each group.
    Returns: None with fewer than two groups, or when all denominators are 0.
    """
    whole = sum(weight for _, weight in parts)
    if len(parts) < 2 or whole <= 0:
        return None
    value = sum(part for part, _ in parts) / whole
    squares = sum((part - value * weight) ** 2 for part, weight in parts)
    return value, math.sqrt(squares * len(parts) / (len(parts) - 1)) / whole


def mean_figure(parts: Sequence[tuple[float, float]]) -> Figure | None:
    """Return `ratio` with its interval by Student's t, with N - 1 degrees of freedom."""
    found = ratio(parts)
    if found is None:
        return None
    value, error = found
    reach = two_sided_t(1 - LEVEL, len(parts) - 1) * error
    return Figure(value=value, error=error, low=value - reach, high=value + reach)


def root_figure(parts: Sequence[tuple[float, float]]) -> Figure | None:
    """Return the square root of `ratio`, such as a standard deviation of pooled squares.

    The interval is symmetric in the logarithm of the ratio, which is skewed by far less.
    """
    found = ratio(parts)
    if found is None:
        return None
    square, error = found
    if square <= 0:
        return Figure(value=0.0, error=0.0, low=0.0, high=0.0)
    root = math.sqrt(square)
    reach = math.exp(two_sided_t(1 - LEVEL, len(parts) - 1) * error / square / 2)
    return Figure(value=root, error=error / (2 * root), low=root / reach, high=root * reach)


def two_sided_t(alpha: float, freedom: int) -> float:
    """Return the t that Student's distribution exceeds, on both sides together, with `alpha`.

    freedom: degrees of freedom, >= 1. From 5 on it is right to 2% for alpha >= 0.002.
    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    """
    z = NormalDist().inv_cdf(1 - alpha / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


# The passes of a scoring as JSON values, for the store. Pure.

Passes = tuple[ShownPass, ...]


def encode_passes(passes: Sequence[ShownPass]) -> list[Any]:
    """Return JSON values: for each pass, [index of the answer, score] in the order shown."""
    return [[[answer, one.scores[answer]] for answer in one.order] for one in passes]


def decode_passes(stored: Any) -> Passes:  # Any: decoded JSON
    """Undo `encode_passes`. Raises: ValueError, TypeError for a damaged value."""
    passes = []
    for shown in stored:
        scores = {int(answer): float(score) for answer, score in shown}
        if sorted(scores) != list(range(len(shown))) or not all(
            0 <= s <= 1 for s in scores.values()
        ):
            raise ValueError("the scores of a pass are damaged")
        passes.append(
            ShownPass(
                order=tuple(int(answer) for answer, _ in shown),
                scores=tuple(scores[answer] for answer in range(len(shown))),
            )
        )
    return tuple(passes)


Parts = list[tuple[float, float]]
"""(numerator, denominator) of each group, for `ingest.noise.estimate`."""


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


# Tell whether a judge has changed from one window of groups to the next. Pure.

FALSE_ALARMS = 0.01
"""Share of windows of an unchanged judge that may raise an alarm."""
SD_FLOOR = 0.01
"""Added to both deviations, in squares, before they are compared: noise below this is far under any
spread that teaches something."""
LEAST_RATIO = 1.1
"""Smallest ratio of two deviations, with the floor added, that raises an alarm."""
LEAST = 0.02
"""Smallest change of the slope, and smallest shift, that raises an alarm, in score units."""


def drifts(
    window: Estimate, *, before: Estimate | None = None, reference: Estimate | None = None
) -> tuple[str, ...]:
    """Return what changed, in words; empty when nothing did.

    before: the window before this one. reference: the window that all are compared with; None when
        it is the one before.
    """
    others = [(one, name) for one, name in ((before, "the window before"),) if one is not None]
    if reference is not None:
        others.append((reference, "the reference window"))
    alpha = FALSE_ALARMS / (1 + 2 * len(others))
    found = _shifted(window, alpha)
    for other, name in others:
        found += _unlike(window, other, "", name, alpha)
    return tuple(found)


def changes_within(
    window: Estimate, first: Estimate | None, second: Estimate | None
) -> tuple[str, ...]:
    """Return what changed within a window, in words; empty when nothing did.

    first, second: its halves, in the order in which the groups were scored again; None: too few
        groups.
    """
    if first is None or second is None:
        return tuple(_shifted(window, FALSE_ALARMS))
    alpha = FALSE_ALARMS / 3
    halves = ("in the second half of the window ", "in the first half")
    return (*_shifted(window, alpha), *_unlike(second, first, *halves, alpha))


def _shifted(window: Estimate, alpha: float) -> list[str]:
    limit = two_sided_t(alpha, window.groups - 1)
    shift = window.shift
    if abs(shift.value) < LEAST or abs(shift.value) <= limit * shift.error:
        return []
    return [f"the second scoring gives {shift.value:+.3f} on average, where one judge gives 0"]


def _unlike(now: Estimate, other: Estimate, where: str, name: str, alpha: float) -> list[str]:
    """Compare noise and slope. where, name: what `now` and `other` are called."""
    found = []
    limit = two_sided_t(alpha, min(now.groups, other.groups) - 1)
    if _apart(now, other) > limit:
        found.append(f"{where}noise sd {now.sd.value:.3f}, {name} {other.sd.value:.3f}")
    change = now.slope.value - other.slope.value
    error = math.hypot(now.slope.error, other.slope.error)
    if abs(change) >= LEAST and abs(change) > limit * error:
        found.append(
            f"{where}position slope {now.slope.value:+.3f}, {name} {other.slope.value:+.3f}"
        )
    return found


def _apart(a: Estimate, b: Estimate) -> float:
    """Return how many standard errors the logarithms of two variances are apart."""
    logs, errors = [], []
    for one in (a, b):
        square = one.sd.value**2 + SD_FLOOR**2
        logs.append(math.log(square))
        errors.append(2 * one.sd.value * one.sd.error / square)
    apart, error = abs(logs[0] - logs[1]), math.hypot(*errors)
    return apart / error if error and apart > 2 * math.log(LEAST_RATIO) else 0.0
