"""Percentiles of waits, and how two arms compare. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2_000
TAIL = 0.025
Slices = Sequence[Sequence[float]]
"""Waits in seconds, in pieces of time: neighbours in time are not independent, so whole pieces are
resampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One arm's percentile over the other's, with its 95% interval."""

    value: float
    low: float
    high: float


def percentile(waits: Sequence[float], share: float) -> float:
    """Return the least wait that at least this share of the waits do not exceed.

    Raises: ValueError without waits.
    """
    if not waits:
        raise ValueError("no waits")
    ordered = sorted(waits)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def ratio(on: Slices, off: Slices, share: float, *, seed: int = 1) -> Ratio:
    """Compare a percentile of two arms; bootstrap over slices. Raises: ValueError without waits."""
    rng = random.Random(seed)
    draws = sorted(
        _at(rng.choices(on, k=len(on)), share) / _at(rng.choices(off, k=len(off)), share)
        for _ in range(RESAMPLES)
    )
    tail = int(RESAMPLES * TAIL)
    return Ratio(
        value=_at(on, share) / _at(off, share), low=draws[tail], high=draws[RESAMPLES - 1 - tail]
    )


def _at(slices: Slices, share: float) -> float:
    return percentile([wait for one in slices for wait in one], share)
