"""Canaries at the limits of what the levels accept, where each level must hold and is used up most.

An equal candidate is far within what a guard accepts (`guard_ratio` times the champion's bad
sessions), so a guard that errs too often would hardly show there. Here the candidate is exactly as
bad as is accepted. State, order, bets and levels are the product's own; no whole canary is played.
"""

from __future__ import annotations

import random

from benchmarks.canary.traffic import World, differences
from deploy.evidence.in_order import InOrder
from deploy.evidence.live import Live, Turn
from deploy.evidence.quality import FLAWS, OF_GROUPS, Quality
from deploy.registry.gate_rule import Comparison, quality_of
from deploy.registry.proof_rule import guard_level, harm, limits_of, proven, ratios_of, threshold
from sidecar.settings import Canary as CanarySettings

WEIGHTS = (0.05, 0.10, 0.25, 0.50)
"""Weights of a ramp, a quarter of the sessions each."""
SESSIONS = 6_000
PRONE = 0.06
"""Share of the champion's sessions in which every turn is bad."""
TURNS = 5
GROUPS = 800


def guard(rules: CanarySettings, seed: int) -> dict[str, bool]:
    """Play a ramp whose candidate has exactly `guard_ratio` times the champion's bad sessions.

    Returns: whether the guard ended it, and whether the split held it.
    """
    rng, live, kind = random.Random(f"guard-{seed}"), Live(ratios_of(rules)), "failed"
    for number in range(SESSIONS):
        weight = WEIGHTS[number * len(WEIGHTS) // SESSIONS]
        canary = rng.random() < weight
        prone = rng.random() < PRONE * (rules.guard_ratio if canary else 1.0)
        bad = frozenset({kind}) if prone else frozenset[str]()
        turn = Turn(unit=f"s{number}", canary=canary, weight=weight, bad=bad)
        live.read([turn] * TURNS)
    return {
        "guard": live.guards[kind].bets.peak >= threshold(guard_level(kind, rules)),
        "held": live.mismatch >= threshold(rules.split_level),
    }


def busy(rules: CanarySettings, seed: int) -> dict[str, bool]:
    """Play a busy site with an equal candidate whose replies take 8 s beside the champion's 30 s.

    Returns: as `guard`.
    """
    rng, live, kind = random.Random(f"busy-{seed}"), Live(ratios_of(rules)), "evasive"
    order, now = InOrder(rules.turn_wait_s), 0.0
    for number in range(2_500):
        now += rng.expovariate(20.0)
        canary = rng.random() < 0.5
        took_s = (8.0 if canary else 30.0) * rng.uniform(0.5, 1.5)
        bad = frozenset({kind}) if rng.random() < 0.2 else frozenset[str]()
        turn = Turn(unit=f"s{number}", canary=canary, weight=0.5, bad=bad)
        order.add(turn, started_at=now, stored_at=now + took_s, place=number)
    live.read(order.take(now + 2.0 * rules.turn_wait_s + 100.0))
    return {
        "guard": live.guards[kind].bets.peak >= threshold(guard_level(kind, rules)),
        "held": live.mismatch >= threshold(rules.split_level),
    }


def groups(rules: CanarySettings, effect: float, seed: int) -> dict[str, bool]:
    """Judge groups of a candidate with a true difference, whose flaws are at their limits.

    Returns: what is proven of it, by claim, `harm` and each kind of flaw.
    """
    rng, limits = random.Random(f"groups-{seed}"), limits_of(rules)
    scores, quality = differences(World(effect=effect), rng), Quality()
    for _ in range(GROUPS):
        champion, _ = next(scores)
        flaws = {
            kind: float(rng.random() < 0.1 + limits.flaws[kind]) - float(rng.random() < 0.1)
            for kind in (*FLAWS, *OF_GROUPS)
        }
        one = Comparison(difference=champion, flaws=flaws)
        quality = quality_of([one], limits, anchored=False, start=quality)
    quiet = Quality(harm=quality.harm)
    return {
        **{claim: claim in proven(quality, rules) for claim in ("no_worse", "better")},
        "harm": harm(quiet, rules) is not None,
        **{
            kind: bets.peak >= threshold(guard_level(kind, rules))
            for kind, bets in quality.flaws.items()
        },
    }
