"""The spread that a group's rewards must have: more than the judge's noise would make of it. Pure.

If the answers of a group are equally good, their scores differ by noise alone. With normal noise of
standard deviation s, independent between the D distinct answers, D times the population variance of
the scores is s^2 times a chi-square variable with D - 1 degrees of freedom. So the variance is
s^2 (D - 1) / D on average, and the spread stays under

    s * sqrt(chi_square_quantile(D - 1, 1 - PASSING) / D)

but for a share `PASSING` of such groups. That is 1.39 s for 2 answers, 1.41 s for 3, 1.33 s for 8.
A factor of 1.5 for all sizes lets 3.4 % of the groups of 2 pass and 1.2 % of those of 8, and drops
more of the groups with a true difference. docs/log.md, 2026-11-25, has both in
the simulation that 1.5 comes from: the gradients point the same way to 0.002, and this limit keeps
3 % more of the groups that have something to tell.

Verifiers have no noise. Where they count, the judge's score has a weight in the reward, and its
noise has the same weight. Where a gate tells the answers of a group apart, the spread is not noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress

from ingest.noise.measured import JudgedBy, MeasuredNoise
from ingest.records import Rewarded, ScoredGroup

PASSING = 0.05
"""Share of the groups of pure noise that pass, at most."""
Noise = Mapping[JudgedBy, MeasuredNoise]
"""Who scored -> the measured noise of such scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadGate:
    """The least spread of one group, and why."""

    least: float
    """Population standard deviation in score units."""
    noise_sd: float | None
    """Standard deviation of the judge's noise in one reward; None: it has none, or it is not
    measured."""

    @property
    def words(self) -> str:
        if self.noise_sd is None:
            return f"least {self.least:.4f} (learner.min_spread)"
        return f"least {self.least:.4f}, by judge noise of sd {self.noise_sd:.4f}"


def spread_gate(
    scored: ScoredGroup,
    noise: Noise,
    *,
    min_spread: float,
    counted: Sequence[bool] | None = None,
) -> SpreadGate:
    """Return the least spread of a group: `min_spread`, or more where the judge is noisy.

    counted: [G] the answers whose rewards make the spread; None: all.
    """
    measured = noise.get(scored.judged_by)
    rewarded, scores = scored.rewarded, scored.scores
    if counted is not None:
        scores = tuple(compress(scores, counted))
        if rewarded is not None:
            rewarded = replace(rewarded, checks=tuple(compress(rewarded.checks, counted)))
    # Scores that are all equal have no noise that shows; the judge may not have been asked.
    share = judge_share(rewarded) if len(set(scores)) > 1 else 0.0
    if measured is None or share == 0.0:
        return SpreadGate(least=min_spread, noise_sd=None)
    sd = share * measured.sd
    return SpreadGate(least=max(min_spread, sd * noise_factor(scores)), noise_sd=sd)


def judge_share(rewarded: Rewarded | None) -> float:
    """Return how much of a change of the judge's score goes into the reward, 0..1.

    0: a gate tells the answers apart, with a gap between both kinds. 1 where the rule is damaged.
    The rules are those of `ingest.verifiers.combine`.
    """
    if rewarded is None:
        return 1.0
    try:
        rule = rewarded.rule
        counting = [one for one in rule["verifiers"] if one["counts"]]
        ranks = rule["combine"] == "gate_then_rank"
        gates = {one["name"]: one["pass_at"] for one in counting if ranks and one["gate"]}
        kinds = {
            all(one["score"] >= gates[one["name"]] for one in checks if one["name"] in gates)
            for checks in rewarded.checks
        }
        weights = sum(one["weight"] for one in counting if one["name"] not in gates)
        share = rule["judge_weight"] / (rule["judge_weight"] + weights)
    except (LookupError, TypeError, ArithmeticError):
        return 1.0
    return 0.0 if len(kinds) > 1 else min(1.0, max(0.0, float(share)))


def noise_factor(scores: Sequence[float]) -> float:
    """Return the spread that pure noise of standard deviation 1 exceeds with `PASSING`.

    scores: [G] the judge's, of one group. Identical answers share one score, so D is the number of
        different ones. Distinct answers that tie make it too small, which is on the safe side: the
        factor falls with D from 3 on.
    """
    return _factor(max(2, len(set(scores))))


@lru_cache(maxsize=64)
def _factor(distinct: int) -> float:
    return math.sqrt(chi_square_quantile(distinct - 1, 1 - PASSING) / distinct)


def chi_square_quantile(freedom: int, share: float) -> float:
    """Return the value under which a chi-square variable stays with probability `share`.

    freedom: degrees of freedom, 1 to 300. Found by bisection of the series of the regularised
    incomplete gamma function.
    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 6.5.29, 26.4.19.
    """
    low, high = 0.0, freedom + 20 * math.sqrt(2 * freedom) + 20
    for _ in range(100):
        middle = (low + high) / 2
        if _chi_square_below(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _chi_square_below(value: float, freedom: int) -> float:
    half, x = freedom / 2, value / 2
    if x <= 0:
        return 0.0
    term = math.exp(half * math.log(x) - x - math.lgamma(half + 1))
    total = term
    place = half
    while term > total * 1e-16:
        place += 1
        term *= x / place
        total += term
    return total
