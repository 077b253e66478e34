"""Agreement of scores with a known order, and intervals over groups. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

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
