"""Many slightly bad candidates, one after the other: how far does quality slide?

The true score of each candidate is its champion's plus a draw around a small loss. Each is judged
by the product's own groups and claims until it is promoted, rolled back or given up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.canary.traffic import World, differences
from deploy.evidence.quality import Quality
from deploy.registry.gate_rule import Comparison, quality_of
from deploy.registry.proof_rule import harm, lacking, limits_of, proven
from sidecar.settings import Canary as CanarySettings

CANDIDATES = 40
MEAN, SPREAD = -0.02, 0.02
"""Mean and standard deviation of the true difference of a candidate to its champion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slide:
    """Where a line of champions ended."""

    end: float
    """True difference of the last champion to the anchor."""
    promoted: int


def slide(rules: CanarySettings, *, seed: int, anchored: bool) -> Slide:
    """Play one line of champions. anchored: False leaves the anchor out of the comparison."""
    rng = random.Random(seed)
    at, promoted = 0.0, 0
    for _ in range(CANDIDATES):
        effect = rng.gauss(MEAN, SPREAD)
        world = World(effect=effect, anchor_effect=at + effect if anchored else None)
        if _is_promoted(world, rules, rng):
            at, promoted = at + effect, promoted + 1
    return Slide(end=at, promoted=promoted)


def _is_promoted(world: World, rules: CanarySettings, rng: random.Random) -> bool:
    limits, quality = limits_of(rules), Quality()
    claims = frozenset[str]()
    for champion, anchor in differences(world, rng):
        one = Comparison(difference=champion, anchor_difference=anchor)
        quality = quality_of([one], limits, anchored=world.anchor_effect is not None, start=quality)
        claims |= proven(quality, rules)
        if quality.groups < rules.gate_prompts:
            continue
        if harm(quality, rules) is not None:
            return False
        if lacking(quality, claims, rules) is None:
            return True
        if quality.groups >= rules.max_groups:
            return False
    raise AssertionError("groups come without end")
