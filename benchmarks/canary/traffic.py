"""Simulated users and judged groups of one canary. Pure: everything comes from the seed.

Sessions of 1 to 20 turns overlap in time. The rates of bad turns drift, and an outage hits both
arms. A share of the sessions opens with the same words, so they have one assignment key. The arm of
a turn comes from the product's own hash. When the candidate fails a request, the champion answers
it if it can, as in the proxy; the failure is the candidate's in either case.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from sidecar.routing.assignment import bucket

POPULAR = "m:popular"
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is true of the traffic and of the candidate."""

    sessions_per_hour: float = 200.0
    hours: float = 12.0
    turn_gap_s: float = 30.0
    low: float = 0.02
    high: float = 0.20
    """Bounds between which the rate of bad turns swings, for each kind."""
    swing_s: float = 7_200.0
    popular: float = 0.0
    """Share of the sessions that open with the same words."""
    outage_at_s: float = -1.0
    """Start of an outage of both arms; below 0: none."""
    outage_s: float = 180.0
    error_rate: float | None = None
    """The candidate's rate of failed turns; None: the champion's."""
    effect: float = 0.0
    """True mean difference of the candidate's judged score to the champion's."""
    anchor_effect: float | None = None
    """The same to the anchor; None: the champion is the anchor."""
    spread: float = 0.35
    """Standard deviation of a group's difference."""
    champion_s: float = 0.0
    """Mean time of the champion's replies; each takes half to one and a half of it."""
    candidate_s: float = 0.0
    lost: float = 0.0
    """Chance that a group loses the answers of an arm, for each arm."""
    flawed: float = 0.0
    """Chance that an answer in a group has a flaw, for each kind and either arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn that is due."""

    at: float
    """Seconds since the ramp began."""
    key: str
    turns: int = 1
    """Turns of its session from this one on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of a request."""

    canary: bool
    """True when the candidate was to answer it."""
    nobody: bool = False
    """True when the champion failed too in the candidate's place."""
    bad: frozenset[str] = field(default_factory=frozenset)


def sessions(world: World, rng: random.Random) -> list[Request]:
    """Return the first turns of all sessions, in the order of their drawing."""
    found = []
    count = round(world.sessions_per_hour * world.hours)
    for number in range(count):
        begins = rng.uniform(0.0, world.hours * 3_600.0)
        key = POPULAR if rng.random() < world.popular else f"m:{number}"
        found.append(Request(at=begins, key=key, turns=rng.randint(1, 20)))
    return found


def requests(world: World, rng: random.Random) -> list[Request]:
    """Return all turns of all sessions in the order of time, for replies that take no time."""
    found = [
        Request(at=one.at + turn * world.turn_gap_s, key=one.key)
        for one in sessions(world, rng)
        for turn in range(one.turns)
    ]
    return sorted(found, key=lambda one: one.at)


def took_s(world: World, *, canary: bool, rng: random.Random) -> float:
    """Draw the time of a reply, in seconds."""
    mean = world.candidate_s if canary else world.champion_s
    return mean * rng.uniform(0.5, 1.5) if mean else 0.0


def reply_to(
    request: Request, world: World, *, salt: str, weight_bp: int, rng: random.Random
) -> Reply:
    """Answer a request as proxy and vLLM would."""
    canary = bucket(salt, request.key) < weight_bp
    rate = rate_at(world, request.at)
    out = world.outage_at_s <= request.at < world.outage_at_s + world.outage_s
    base = 1.0 if out and world.outage_at_s >= 0.0 else rate
    mine = base
    if canary and world.error_rate is not None:
        mine = max(base, world.error_rate)
    failed = rng.random() < mine
    if failed:
        nobody = canary and rng.random() < base
        return Reply(canary=canary, nobody=nobody, bad=frozenset({"failed"}))
    kinds = ("cut", "short", "invalid", "evasive")
    bad = frozenset(kind for kind in kinds if rng.random() < rate / 2.0)
    return Reply(canary=canary, bad=bad)


def rate_at(world: World, at: float) -> float:
    """Return the rate of bad turns of both arms at a time."""
    middle, half = (world.high + world.low) / 2.0, (world.high - world.low) / 2.0
    return middle + half * math.sin(2.0 * math.pi * at / world.swing_s)


def differences(world: World, rng: random.Random) -> Iterator[tuple[float, float | None]]:
    """Yield the differences of groups to champion and anchor, without end."""
    while True:
        noise = rng.gauss(0.0, world.spread)
        champion = _clipped(world.effect + noise)
        if world.anchor_effect is None:
            yield champion, None
        else:
            # The candidate's own noise is in both; champion and anchor have noise of their own.
            other = 0.5 * noise + math.sqrt(0.75) * rng.gauss(0.0, world.spread)
            yield champion, _clipped(world.anchor_effect + other)


def _clipped(value: float) -> float:
    return max(-1.0, min(1.0, value))
