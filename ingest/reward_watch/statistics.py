"""Intervals for rates, lengths and correlations of answers that come in sessions. Pure.

The answers of one session resemble each other, so the session is the unit: variances are sums over
sessions (for correlations: over groups) of squared residuals, as in cluster-robust estimation
(Liang and Zeger 1986; for a ratio of sums: Cochran, Sampling Techniques, 3rd ed., 9.3 and 11.8).
Such a variance is known from as many values as there are sessions, so the limits are those of
Student's t with one degree of freedom fewer (Donald and Lang 2007).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

UNSEEN_LIKENESS = 0.2
"""Correlation within a session that is taken where a rate of 0 or 1 shows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A share of answers."""

    n: int
    """Answers."""
    hits: int
    weight: float
    """Independent answers that would tell as much, 0..n."""
    sessions: int
    """Sessions that the answers are of: the sample size."""

    @property
    def share(self) -> float:
        return self.hits / self.n if self.n else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over answers with its standard error."""

    n: int
    mean: float
    error: float
    sessions: int
    """Sessions that the answers are of: the sample size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Sums of one group's centred scores and lengths."""

    xx: float
    yy: float
    xy: float


def z_of(tail: float) -> float:
    """Return the standard normal value that is exceeded with this probability, 0 < tail < 1."""
    return NormalDist().inv_cdf(1.0 - tail)


def t_of(tail: float, freedom: int) -> float:
    """Return the value that Student's t exceeds with this probability.

    tail: above 0, under 0.5. freedom: degrees of freedom; infinite below 1, where nothing is known.
    Found by bisection of the distribution function, to 1e-9 of the value.
    """
    return math.inf if freedom < 1 else _t_of(tail, freedom)


@lru_cache(maxsize=4_096)
def _t_of(tail: float, freedom: int) -> float:
    low, high = 0.0, 1.0
    while _t_above(high, freedom) > tail:
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _t_above(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_above(t: float, freedom: int) -> float:
    """Return the probability that Student's t exceeds `t` >= 0.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    if freedom > MOST_FREEDOM:
        return 1.0 - NormalDist().cdf(t)
    angle = math.atan2(t, math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(odd + 2, freedom + 1, 2):
        total += term
        term *= square * (number - 1) / number
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1.0 - within) / 2


MOST_FREEDOM = 2_000
"""Degrees of freedom from which on the normal distribution is taken: at a tail of 0.0005 its value
is smaller by under 0.2%."""


def rate_of(sessions: Iterable[tuple[int, int]]) -> Rate:
    """Estimate a rate. sessions: (answers, hits) of each session."""
    pairs = [(n, hits) for n, hits in sessions if n > 0]
    n, hits = sum(n for n, _ in pairs), sum(hits for _, hits in pairs)
    if not n:
        return Rate(n=0, hits=0, weight=0.0, sessions=0)
    share, count = hits / n, len(pairs)
    spread = share * (1.0 - share) / n
    size = sum(one * one for one, _ in pairs) / n
    effect = 1.0 + (size - 1.0) * UNSEEN_LIKENESS
    if spread > 0.0 and count > 1:
        squares = sum((hits - share * one) ** 2 for one, hits in pairs)
        seen = count / (count - 1) * squares / (n * n) / spread
        # A few hits in sessions of their own show no likeness: it is not known to be less.
        effect = max(1.0, seen) if hits >= MANY and n - hits >= MANY else max(effect, seen)
    return Rate(n=n, hits=hits, weight=n / effect, sessions=count)


MANY = 20
"""Hits from which on their likeness within sessions is taken as it is seen."""


def wilson(rate: Rate, tail: float) -> Interval:
    """Return Wilson's score interval of a rate, with its weight as the number of answers.

    tail: chance of each limit to be passed.
    """
    t = t_of(tail, rate.sessions - 1)
    if rate.weight <= 0.0 or not math.isfinite(t):
        return Interval(value=rate.share, low=0.0, high=1.0)
    share, n = rate.share, rate.weight
    centre = (share + t * t / (2 * n)) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(share * (1 - share) / n + t * t / (4 * n * n))
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))


def rise(now: Rate, before: Rate, tail: float) -> Interval:
    """Return the difference of two rates, `now` minus `before`.

    Source: Newcombe 1998, "Interval estimation for the difference between independent
    proportions", method 10, with Wilson's intervals.
    """
    mine, theirs = wilson(now, tail), wilson(before, tail)
    value = now.share - before.share
    return Interval(
        value=value,
        low=value - math.hypot(now.share - mine.low, theirs.high - before.share),
        high=value + math.hypot(mine.high - now.share, before.share - theirs.low),
    )


def mean_of(sessions: Iterable[tuple[int, float]]) -> Mean | None:
    """Estimate a mean over answers. sessions: (answers, sum) of each. None: under two sessions."""
    pairs = [(n, total) for n, total in sessions if n > 0]
    n = sum(n for n, _ in pairs)
    if len(pairs) < 2:
        return None
    mean = sum(total for _, total in pairs) / n
    squares = sum((total - mean * one) ** 2 for one, total in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * squares) / n
    return Mean(n=n, mean=mean, error=error, sessions=len(pairs))


def difference(now: Mean, before: Mean, tail: float) -> Interval:
    """Return the difference of two means, `now` minus `before`.

    Each error has the t of its own sessions, as each rate has in `rise`.
    """
    half = math.hypot(
        *(t_of(tail, one.sessions - 1) * one.error if one.error else 0.0 for one in (now, before))
    )
    value = now.mean - before.mean
    return Interval(value=value, low=value - half, high=value + half)


def moments(lengths_G: Sequence[int], scores_G: Sequence[float]) -> Moments:
    """Centre one group. lengths_G: [G] tokens, taken as log(1 + tokens). scores_G: [G]."""
    logs = [math.log1p(length) for length in lengths_G]
    x_mean, y_mean = sum(logs) / len(logs), sum(scores_G) / len(scores_G)
    xs, ys = [x - x_mean for x in logs], [y - y_mean for y in scores_G]
    return Moments(
        xx=sum(x * x for x in xs),
        yy=sum(y * y for y in ys),
        xy=sum(x * y for x, y in zip(xs, ys, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """A correlation within groups, pooled over them."""

    groups: int
    """Groups in which both lengths and scores differ."""
    r: float
    error: float
    """Standard error of Fisher's z of `r`."""

    def interval(self, tail: float) -> Interval:
        """tail: chance of each limit to be passed."""
        middle, reach = math.atanh(self.r), t_of(tail, self.groups - 1) * self.error
        return Interval(value=self.r, low=math.tanh(middle - reach), high=math.tanh(middle + reach))


LIMIT = 0.999
"""Largest correlation; at 1 Fisher's z is infinite."""


def pooled_correlation(groups: Iterable[Moments]) -> Correlation | None:
    """Pool centred groups into one correlation; None: under three groups tell something.

    The error is that of the first-order expansion of r in the groups' sums, on Fisher's scale.
    """
    told = [one for one in groups if one.xx > 0.0 and one.yy > 0.0]
    if len(told) < 3:
        return None
    xx, yy = sum(one.xx for one in told), sum(one.yy for one in told)
    scale = math.sqrt(xx * yy)
    r = sum(one.xy for one in told) / scale
    squares = sum((one.xy / scale - r / 2 * (one.xx / xx + one.yy / yy)) ** 2 for one in told)
    r = max(-LIMIT, min(LIMIT, r))
    error = math.sqrt(len(told) / (len(told) - 1) * squares) / (1.0 - r * r)
    return Correlation(groups=len(told), r=r, error=error)
