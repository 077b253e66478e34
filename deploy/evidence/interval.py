"""A confidence sequence of a bounded mean: intervals that all hold it at the same time. Pure.

It is for the chart: decisions rest on `deploy.evidence.betting`. Width and centre follow the
variance seen so far, and the state is six numbers.

Source: Waudby-Smith and Ramdas (arXiv:2010.09686), theorem 2: the predictable plug-in empirical
Bernstein confidence sequence. The tests hold values of their own program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGEST_BET = 0.5
"""Truncation of the bets (`c` in the source)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """State after some observations in 0..1."""

    observations: int = 0
    total: float = 0.0
    """Sum of the observations."""
    squares: float = 0.0
    """Sum of the squared differences of each observation from the mean estimated with it."""
    bets: float = 0.0
    """Sum of the bets."""
    weighted: float = 0.0
    """Sum of bet times observation."""
    cost: float = 0.0
    """Sum of what the bets' variance costs."""


EMPTY = Sequence()


def observe(sequence: Sequence, value: float, level: float) -> Sequence:
    """Return the state after one observation. value: 0..1. level: as for `bounds`, each time."""
    number = sequence.observations + 1
    # Both estimates are of the observations before this one.
    mean_before = (sequence.total + 0.5) / number
    variance_before = (sequence.squares + 0.25) / number
    size = math.sqrt(
        2.0 * math.log(2.0 / level) / (number * math.log(1 + number) * variance_before)
    )
    size = min(size, LARGEST_BET)
    error = (value - mean_before) ** 2
    mean = (sequence.total + value + 0.5) / (number + 1)
    return Sequence(
        observations=number,
        total=sequence.total + value,
        squares=sequence.squares + (value - mean) ** 2,
        bets=sequence.bets + size,
        weighted=sequence.weighted + size * value,
        # psi_E of the source.
        cost=sequence.cost + error * (-math.log1p(-size) - size),
    )


def bounds(sequence: Sequence, level: float) -> tuple[float, float]:
    """Return the interval of the mean, within 0..1.

    All intervals of one sequence hold the mean with a probability of at least 1 - level.
    """
    if not sequence.observations:
        return 0.0, 1.0
    centre = sequence.weighted / sequence.bets
    half = (math.log(2.0 / level) + sequence.cost) / sequence.bets
    return max(0.0, centre - half), min(1.0, centre + half)
