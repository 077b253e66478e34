"""Latency histograms of the load generator: pairs of nanoseconds and count. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Histogram = Sequence[tuple[int, int]]
"""(value in nanoseconds, how many), in growing order of value."""


def percentile_us(histogram: Histogram, share: float) -> float | None:
    """The value that `share` (0..1) of all are at or under, in microseconds; None of nothing.

    Nearest rank: the smallest value whose cumulated count reaches share x total.
    """
    total = sum(count for _, count in histogram)
    if total == 0:
        return None
    seen = 0
    for value, count in histogram:
        seen += count
        if seen >= share * total:
            return value / 1000
    return histogram[-1][0] / 1000


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """All of them as one."""
    counts: Counter[int] = Counter()
    for histogram in histograms:
        for value, count in histogram:
            counts[value] += count
    return sorted(counts.items())
