"""Profiles of simulated adapters, to measure how often the reward watch finds something.

A session has one to twenty answers (geometric, mean 5), and an answer's chance of a trait varies
between sessions: beta-distributed with the correlation `likeness` within a session. Lengths are
log-normal with a part of the session's own. Users' signals are a trait like others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from random import Random

from ingest.reward_watch.rules import Moments, mean_of, moments, pooled_correlation, rate_of
from ingest.reward_watch.traits import KINDS, Kind, Profile, RateOf

USUAL: Mapping[Kind, float] = {
    "refusal": 0.02,
    "clarifying": 0.05,
    "invalid_call": 0.01,
    "repetition": 0.005,
    "empty": 0.002,
    "cut": 0.03,
}
"""Shares of the kinds in usual traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How an adapter answers."""

    shares: Mapping[Kind, float] = field(default_factory=lambda: USUAL)
    log_tokens: float = 5.0
    """Mean of log(1 + tokens); 5: some 150 tokens."""
    taste: float = 0.0
    """Correlation of score and log length within groups that the judge gives."""
    signals: float = 0.06
    feedback: float = 0.3


def simulate(
    behaviour: Behaviour,
    rng: Random,
    *,
    answers: int,
    groups: int = 64,
    likeness: float = 0.2,
    session: int = 0,
) -> Profile:
    """Draw a profile of this many answers and groups of 8.

    session: answers of each session; 0: drawn.
    """
    sizes = [session] * (answers // session) if session else _sessions(rng, answers)
    counted = Counter(sizes)
    rates: dict[Kind, RateOf] = {}
    for kind in KINDS:
        rates[kind] = simulate_rate(rng, counted, behaviour.shares[kind], likeness)
    lengths = []
    up = (1 + behaviour.feedback) / 2
    for size in sizes:
        # The sum of `size` answers, each of this mean, 0.4 of the session's own and 0.6 of its own.
        spread = math.hypot(size * 0.4, math.sqrt(size) * 0.6)
        lengths.append((size, rng.gauss(size * behaviour.log_tokens, spread)))
    votes = Counter(voted for _, voted in _hits(rng, counted, 0.1, 0.0))
    told = [(voted, 2.0 * ups - voted) for voted, ups in _hits(rng, votes, up, 0.0)]
    mean, feedback = mean_of(lengths), mean_of(told)
    found = pooled_correlation(_group(rng, behaviour.taste) for _ in range(groups))
    return Profile(
        answers=sum(sizes),
        sessions=len(sizes),
        newest=sum(sizes),
        rates=rates,
        log_tokens=mean,
        groups=0 if found is None else found.groups,
        correlation=None if found is None else found.r,
        correlation_error=0.0 if found is None else found.error,
        signals=simulate_rate(rng, counted, behaviour.signals, likeness),
        feedback=feedback,
    )


def _sessions(rng: Random, answers: int) -> list[int]:
    sizes: list[int] = []
    left = answers
    while left > 0:
        # Geometric: one more with a chance of 0.8 each, up to 20.
        size = min(20, 1 + int(math.log(1.0 - rng.random()) / math.log(0.8)))
        sizes.append(min(size, left))
        left -= sizes[-1]
    return sizes


def simulate_rate(rng: Random, sizes: Mapping[int, int], share: float, likeness: float) -> RateOf:
    """Draw a rate. sizes: answers of a session -> sessions of that size."""
    return rate_of(_hits(rng, sizes, share, likeness))


def _hits(
    rng: Random, sizes: Mapping[int, int], share: float, likeness: float
) -> list[tuple[int, int]]:
    """Draw (answers, hits) of each session: one draw a session, an answer each would take long."""
    return [
        (size, hits)
        for size, count in sizes.items()
        for hits in rng.choices(
            range(size + 1), cum_weights=_cumulated(size, share, likeness), k=count
        )
    ]


@lru_cache(maxsize=1_024)
def _cumulated(size: int, share: float, likeness: float) -> list[float]:
    """Return the chances of at most 0..size hits: beta-binomial, without likeness binomial."""
    if likeness <= 0.0 or not 0.0 < share < 1.0:
        return list(
            accumulate(
                math.comb(size, hits) * share**hits * (1.0 - share) ** (size - hits)
                for hits in range(size + 1)
            )
        )
    total = (1.0 - likeness) / likeness
    a, b = share * total, (1.0 - share) * total
    return list(
        accumulate(
            math.comb(size, hits) * math.exp(_log_beta(hits + a, size - hits + b) - _log_beta(a, b))
            for hits in range(size + 1)
        )
    )


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _group(rng: Random, taste: float) -> Moments:
    logs = [rng.gauss(5.0, 0.5) for _ in range(8)]
    mean = sum(logs) / 8
    scores = [
        0.5 + 0.2 * (taste * (one - mean) / 0.5 + math.sqrt(1 - taste**2) * rng.gauss(0, 1))
        for one in logs
    ]
    return moments([max(0, round(math.expm1(one))) for one in logs], scores)
