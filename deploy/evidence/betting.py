"""E-processes by betting: evidence that is valid at every look. Pure.

Gamblers start with a wealth of 1 each and bet against a null hypothesis at its own odds; the
evidence E is their mean wealth. While the hypothesis is true, E exceeds 1 / level at any time ever
with a probability of at most `level` (Ville's inequality), for any number of looks and any rule of
stopping.

`bet` is against "the mean is at most m", for observations in 0..1: seven gamblers bet a fixed
fraction of what m allows. No variance is assumed. `bet_on_arm` is against "a unit is the canary's
with odds of at most `odds`": each gambler believes in other odds and bets as they tell.

Each observation that speaks for the null hypothesis costs the gamblers, so what becomes wrong late
would be found late. Therefore a part of the wealth may be kept back (`begin`) and paid out bit by
bit (`pay_out`): those gamblers begin at a later observation. This moves wealth and makes none, so
the level stays that of all time together. E is a mixture over the observations at which the bets
begin, with weights that add up to 1; without such weights it would be the e-detector of Shin,
Ramdas and Rinaldo (arXiv:2203.03532), which bounds the mean time to a false alarm and not its
chance.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B
2024, arXiv:2010.09686), section 4, with a mixture of constant bets. The tests hold values of their
own program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

FRACTIONS = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.95)
"""Bets as fractions of the one that could lose everything. Small ones suit small effects. With 0.5
as the largest, an effect of 0.2 at a spread of 0.25 took 53 groups and not 31 (docs/log.md)."""
SLOWNESS = 10
"""Observations by which the paying out of what is kept back is slowed down at the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bets:
    """State of one e-process."""

    log_wealth: tuple[float, ...] = (0.0,) * len(FRACTIONS)
    """Natural logarithm of each gambler's wealth."""
    observations: int = 0
    peak: float = 0.0
    """Largest `log_e` so far, in nats. Ville's inequality bounds it too, so a level once reached
    stays reached."""
    peak_at: int = 0
    """Number of observations at the peak."""

    @property
    def log_e(self) -> float:
        """Natural logarithm of the mean wealth."""
        return log_mean_exp(self.log_wealth)


START = Bets()


def bet(bets: Bets, value: float, mean: float) -> Bets:
    """Return the state after one observation.

    value: the observation, 0..1. mean: the largest mean under the null hypothesis, above 0 and
    below 1; it must not depend on `value`.
    Raises: ValueError for another value or mean.
    """
    if not (0.0 <= value <= 1.0 and 0.0 < mean < 1.0):
        raise ValueError(f"an observation of {value} against a mean of {mean} cannot be bet on")
    gain = (value - mean) / mean
    return _grown(bets, [math.log1p(fraction * gain) for fraction in FRACTIONS])


def bet_on_arm(bets: Bets, canary: bool, odds: float, beliefs: tuple[float, ...]) -> Bets:
    """Return the state after one unit of which the arm is seen.

    canary: True when the canary met it. odds: of that, the largest under the null hypothesis, above
    0; they must not depend on `canary`. beliefs: multiples of the odds, the same for each unit; for
    evidence of odds that are too large they are above 1. Each gambler's wealth is the likelihood
    ratio of the belief against the null hypothesis.
    """
    return _grown(bets, _log_factors(canary, odds, beliefs))


@lru_cache(maxsize=64)
def _log_factors(canary: bool, odds: float, beliefs: tuple[float, ...]) -> tuple[float, ...]:
    """Return the logarithms of what each gambler's wealth is multiplied by. Kept, because most
    units of a ramp have one of a few odds."""
    share = odds / (1.0 + odds)
    scales = [1.0 + (belief - 1.0) * share for belief in beliefs]
    if canary:
        factors = [belief / scale for belief, scale in zip(beliefs, scales, strict=True)]
    else:
        factors = [1.0 / scale for scale in scales]
    return tuple([math.log(factor) for factor in factors])


def begin(gamblers: int, *, kept: float = 0.0) -> Bets:
    """Return the state before the first observation.

    kept: share of the wealth that is kept back for `pay_out`, 0 to below 1. If above 0, a last one
    beside the `gamblers` holds it and bets nothing: give it a belief of 1.
    """
    if not kept:
        return Bets(log_wealth=(0.0,) * gamblers)
    every = gamblers + 1
    one = math.log((1.0 - kept) * every / gamblers)
    return Bets(log_wealth=(*(one,) * gamblers, math.log(kept * every)))


def pay_out(bets: Bets, among: int) -> Bets:
    """Return the state after the last of `log_wealth` gave a part to the `among` before it, in
    equal parts.

    The n-th time it is 1 / (2 n + 2 `SLOWNESS`) of what is left, so of what is kept at first about
    n^-1.5 begins at the n-th observation. A harm that begins behind n observations therefore needs
    about 1.5 log(n) nats more.
    """
    *gamblers, kept = bets.log_wealth
    part = 0.5 / (bets.observations + 1 + SLOWNESS)
    more = kept + math.log(part / among)
    paid = [_log_sum(one, more) for one in gamblers[-among:]]
    return Bets(
        log_wealth=(*gamblers[:-among], *paid, kept + math.log1p(-part)),
        observations=bets.observations,
        peak=bets.peak,
        peak_at=bets.peak_at,
    )


def _log_sum(one: float, other: float) -> float:
    """Return log(exp(one) + exp(other)), without overflow."""
    return max(one, other) + math.log1p(math.exp(-abs(one - other)))


def _grown(bets: Bets, log_factors: Sequence[float]) -> Bets:
    if len(bets.log_wealth) != len(log_factors):
        raise ValueError(f"{len(bets.log_wealth)} gamblers cannot make {len(log_factors)} bets")
    wealth = tuple(map(add, bets.log_wealth, log_factors))
    observations, log_e = bets.observations + 1, log_mean_exp(wealth)
    higher = log_e > bets.peak
    return Bets(
        log_wealth=wealth,
        observations=observations,
        peak=log_e if higher else bets.peak,
        peak_at=observations if higher else bets.peak_at,
    )


def log_mean_exp(logs: tuple[float, ...]) -> float:
    """Return the logarithm of the mean of exp(logs), without overflow. logs: at least one."""
    most = max(logs)
    return most + math.log(sum([math.exp(one - most) for one in logs]) / len(logs))


def threshold(level: float) -> float:
    """Return the `log_e` from which on a null hypothesis is rejected at this level, in nats."""
    return -math.log(level)
