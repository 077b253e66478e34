"""Profiles of simulated adapters, to measure how often the reward watch finds something.

A session has one to twenty answers (geometric, mean 5), and an answer's chance of a trait varies
between sessions: beta-distributed with the correlation `likeness` within a session. Lengths are
log-normal with a part of the session's own. Users' signals are a trait like others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from ingest.reward_watch.profile import MeanOf, Profile, RateOf
from ingest.reward_watch.statistics import (
    Mean,
    Moments,
    mean_of,
    moments,
    pooled_correlation,
    rate_of,
)
from ingest.reward_watch.traits import KINDS, Kind

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
    rates: dict[Kind, RateOf] = {}
    for kind in KINDS:
        rates[kind] = _rate(rng, sizes, behaviour.shares[kind], likeness)
    lengths = []
    told = []
    for size in sizes:
        own = rng.gauss(0.0, 0.4)
        drawn = (behaviour.log_tokens + own + rng.gauss(0.0, 0.6) for _ in range(size))
        lengths.append((size, sum(drawn)))
        voted = sum(rng.random() < 0.1 for _ in range(size))
        up = (1 + behaviour.feedback) / 2
        told.append((voted, float(sum(1 if rng.random() < up else -1 for _ in range(voted)))))
    mean, feedback = mean_of(lengths), mean_of(told)
    found = pooled_correlation(_group(rng, behaviour.taste) for _ in range(groups))
    return Profile(
        answers=sum(sizes),
        sessions=len(sizes),
        newest=sum(sizes),
        rates=rates,
        log_tokens=_mean(mean),
        groups=0 if found is None else found.groups,
        correlation=None if found is None else found.r,
        correlation_error=0.0 if found is None else found.error,
        signals=_rate(rng, sizes, behaviour.signals, likeness),
        feedback=_mean(feedback),
    )


def _sessions(rng: Random, answers: int) -> list[int]:
    sizes: list[int] = []
    while sum(sizes[-1:]) or not sizes:
        left = answers - sum(sizes)
        if left <= 0:
            break
        size = 1
        while size < 20 and rng.random() < 0.8:
            size += 1
        sizes.append(min(size, left))
    return sizes


def _rate(rng: Random, sizes: list[int], share: float, likeness: float) -> RateOf:
    pairs = []
    for size in sizes:
        chance = share
        if likeness > 0.0 and 0.0 < share < 1.0:
            total = (1.0 - likeness) / likeness
            chance = rng.betavariate(share * total, (1.0 - share) * total)
        pairs.append((size, sum(rng.random() < chance for _ in range(size))))
    rate = rate_of(pairs)
    return RateOf(n=rate.n, hits=rate.hits, weight=rate.weight, sessions=rate.sessions)


def _mean(found: Mean | None) -> MeanOf | None:
    if found is None:
        return None
    return MeanOf(n=found.n, mean=found.mean, error=found.error, sessions=found.sessions)


def _group(rng: Random, taste: float) -> Moments:
    logs = [rng.gauss(5.0, 0.5) for _ in range(8)]
    mean = sum(logs) / 8
    scores = [
        0.5 + 0.2 * (taste * (one - mean) / 0.5 + math.sqrt(1 - taste**2) * rng.gauss(0, 1))
        for one in logs
    ]
    return moments([max(0, round(math.expm1(one))) for one in logs], scores)
