"""Canaries at the limits of what the levels accept, where each level must hold and is used up most.

An equal candidate is far within what a guard accepts (`GUARD_RATIO` times the champion's bad
sessions), so a guard that errs too often would hardly show there. Here the candidate is exactly as
bad as is accepted. State, order, bets and levels are the product's own; no whole canary is played.
"""

from __future__ import annotations

import math
import random

from benchmarks.canary.traffic import World, differences
from deploy.canary.gate_store import drawn_turn
from deploy.evidence.live import InOrder, Live, Turn
from deploy.evidence.quality import FLAWS, OF_GROUPS, Quality
from deploy.registry.canary_rule import Comparison, quality_of
from deploy.registry.proof_rule import (
    GUARD_RATIO,
    SPLIT_LEVEL,
    harm,
    level_of,
    limits_of,
    proven,
    ratios_of,
    threshold,
)
from sidecar.settings import Canary as CanarySettings

WEIGHTS = (0.05, 0.10, 0.25, 0.50)
"""Weights of a ramp, a quarter of the sessions each."""
SESSIONS = 6_000
PRONE = 0.06
"""Share of the champion's sessions in which every turn is bad."""
TURNS = 5
GROUPS = 800
LOOK_S = 10.0
"""Time between two looks at a busy site."""


def guard(rules: CanarySettings, seed: int) -> dict[str, bool]:
    """Play a ramp whose candidate has exactly `GUARD_RATIO` times the champion's bad sessions.

    Returns: whether the guard ended it, and whether the split held it.
    """
    rng, live, kind = random.Random(f"guard-{seed}"), Live(ratios_of()), "failed"
    for number in range(SESSIONS):
        weight = WEIGHTS[number * len(WEIGHTS) // SESSIONS]
        canary = rng.random() < weight
        prone = rng.random() < PRONE * (GUARD_RATIO if canary else 1.0)
        bad = frozenset({kind}) if prone else frozenset[str]()
        turn = Turn(unit=f"s{number}", canary=canary, weight=weight, bad=bad)
        live.read([turn] * TURNS)
    return _ended(live, kind, rules)


def busy(rules: CanarySettings, most_turns: int, bad_share: float, seed: int) -> dict[str, bool]:
    """Play a busy site with an equal candidate whose replies take 8 s beside the champion's 30 s.

    most_turns: a conversation has one to so many requests, without a pause between them. bad_share:
    of the replies, of either arm. Returns: as `guard`.
    """
    rng, live, kind = random.Random(f"busy-{seed}"), Live(ratios_of()), "evasive"
    now, ended = 0.0, list[tuple[float, float, float, Turn]]()
    for number in range(2_500 if most_turns == 1 else 1_000):
        now += rng.expovariate(20.0)
        canary, began = rng.random() < 0.5, now
        for _ in range(rng.randint(1, most_turns)):
            took_s = (8.0 if canary else 30.0) * rng.uniform(0.5, 1.5)
            bad = frozenset({kind}) if rng.random() < bad_share else frozenset[str]()
            turn = Turn(unit=f"s{number}", canary=canary, weight=0.5, bad=bad)
            ended.append((began + took_s, began, took_s, turn))
            began += took_s
    order, look_at = InOrder(rules.turn_wait_s), 0.0
    for place, (at, began, took_s, turn) in enumerate(sorted(ended, key=lambda one: one[0])):
        if at >= look_at:
            live.read(order.take(at))
            look_at = at + LOOK_S
        order.add(turn, started_at=began, stored_at=at, took_s=took_s, place=place)
    live.read(order.take(math.inf))
    return _ended(live, kind, rules)


def together(rules: CanarySettings, seed: int) -> dict[str, bool]:
    """Play long sessions that all begin with the ramp, with a candidate that is better at every
    turn: the last sessions to have a bad turn are nearly all the candidate's.

    Returns: as `guard`.
    """
    rng, live, kind = random.Random(f"together-{seed}"), Live(ratios_of()), "failed"
    arms = [rng.random() < 0.5 for _ in range(500)]
    for _ in range(20):
        for number, canary in enumerate(arms):
            fails = rng.random() < (0.25 if canary else 0.5)
            bad = frozenset({kind}) if fails else frozenset[str]()
            live.read([Turn(unit=f"s{number}", canary=canary, weight=0.5, bad=bad)])
    return _ended(live, kind, rules)


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
        "harm": harm(quiet) is not None,
        **{kind: bets.peak >= threshold(level_of(kind)) for kind, bets in quality.flaws.items()},
    }


def small_talk(rules: CanarySettings, effect: float, seed: int) -> dict[str, bool]:
    """Judge a turn of each of many sessions of six, as the gate draws it. 70% of them end in small
    talk, where nobody differs.

    effect: at the other turns. Returns: what is proven, as `groups`.
    """
    rng, limits = random.Random(f"talk-{seed}"), limits_of(rules)
    scores, quality = differences(World(effect=effect), rng), Quality()
    for number in range(GROUPS):
        turns = [f"x{number}-{turn}" for turn in range(6)]
        last = drawn_turn(f"salt-{seed}", f"s{number}", turns) == turns[-1]
        small = last and rng.random() < 0.7
        difference = rng.gauss(0.0, 0.15) if small else next(scores)[0]
        one = Comparison(difference=max(-1.0, min(1.0, difference)))
        quality = quality_of([one], limits, anchored=False, start=quality)
    return {claim: claim in proven(quality, rules) for claim in ("no_worse", "better")}


def _ended(live: Live, kind: str, rules: CanarySettings) -> dict[str, bool]:
    return {
        "guard": live.guards[kind].bets.peak >= threshold(level_of(kind)),
        "held": live.mismatch >= threshold(SPLIT_LEVEL),
    }
