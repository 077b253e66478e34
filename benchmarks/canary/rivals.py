"""Rules that look often and pay nothing for it, and one that pays, to hold the product against.

`Peeking` is a fixed-size test repeated at every look, which is what a dashboard with a p-value
invites. `Shares` is the rule that this project had before. `asymptotic_half_width` is the
sequential interval of another product (GrowthBook's gbstats): what certainty costs there.
"""

from __future__ import annotations

import math

from benchmarks.canary.play import History

ONE_SIDED = 1.645
"""Standard normal quantile of a one-sided test at 5%."""
FEWEST = 10


class Peeking:
    """z-tests at 5% after every look: for "better", for "worse" and for "fails more often"."""

    def __init__(self) -> None:
        self.promotes = False
        self.rolls_back = False
        self._count = 0
        self._total = 0.0
        self._squares = 0.0

    def __call__(self, history: History) -> None:
        for score in history.scores[self._count :]:
            self._total, self._squares = self._total + score, self._squares + score * score
        self._count = len(history.scores)
        if self._count >= FEWEST:
            mean = self._total / self._count
            variance = max(1e-9, self._squares / self._count - mean * mean)
            score = mean / math.sqrt(variance / self._count)
            self.promotes |= score > ONE_SIDED
            self.rolls_back |= score < -ONE_SIDED
        if min(history.canary, history.champion) >= FEWEST:
            both = (history.canary_bad + history.champion_bad) / (history.canary + history.champion)
            spread = both * (1 - both) * (1 / history.canary + 1 / history.champion)
            apart = history.canary_bad / history.canary - history.champion_bad / history.champion
            self.rolls_back |= spread > 0 and apart / math.sqrt(spread) > ONE_SIDED


class Shares:
    """Rolls back when the canary's share of failed turns exceeds the champion's by a tenth."""

    def __init__(self, *, excess: float = 0.10, fewest: int = 20) -> None:
        self.rolls_back = False
        self._excess = excess
        self._fewest = fewest

    def __call__(self, history: History) -> None:
        if history.canary >= self._fewest and history.champion:
            apart = history.canary_bad / history.canary - history.champion_bad / history.champion
            self.rolls_back |= apart > self._excess


def asymptotic_half_width(
    *, variance: float, count: int, level: float, tuned_for: float = 5_000.0
) -> float:
    """Return half the width of the asymptotic confidence sequence of a mean.

    variance: of one observation. tuned_for: number of observations at which it is narrowest.
    Source: Waudby-Smith et al., arXiv:2103.06476, equations 9 and 161.
    """
    tail = -2.0 * math.log(level)
    rho_2 = (tail + math.log(tail + 1.0)) / tuned_for
    grown = count * rho_2 + 1.0
    return math.sqrt(
        variance * 2.0 * grown * math.log(math.sqrt(grown) / level) / (count * count * rho_2)
    )
