"""A figure over groups with its error and interval. Pure.

Groups are what is drawn at random: the answers of one group share a prompt, so they are not
independent. Errors are those of ratios of sums over groups, by linearisation; nothing is resampled,
so the same groups always give the same interval.
Source: Cochran, Sampling Techniques, 3rd ed. (1977), 6.4 (ratio estimates).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

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
