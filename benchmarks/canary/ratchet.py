"""Many slightly bad candidates, one after the other: how far does quality slide?

The true score of each candidate is its champion's plus a draw around a small loss. Each is judged
by the product's own groups and claims until it is promoted, rolled back or given up, and the anchor
moves by the product's own rule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.canary.begun import begun_canary
from benchmarks.canary.traffic import World, differences
from deploy.evidence.quality import Quality
from deploy.registry.canary_rule import Comparison, quality_of
from deploy.registry.proof_rule import anchor_after, harm, lacking, limits_of, proven
from sidecar.settings import Canary as CanarySettings

CANDIDATES = 40
MEAN, SPREAD = -0.02, 0.02
"""Mean and standard deviation of the true difference of a candidate to its champion."""


WON = 0.35
"""How much better than the anchor the first champion of `from_above` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slide:
    """Where a line of champions ended."""

    end: float
    """True difference of the last champion to the first one."""
    promoted: int


def slide(
    rules: CanarySettings,
    *,
    seed: int,
    anchored: bool,
    start: float = 0.0,
    candidates: int = CANDIDATES,
    mean: float = MEAN,
    spread: float = SPREAD,
) -> Slide:
    """Play one line of champions.

    anchored: False leaves the anchor out of the comparison. start: true difference of the first
    champion to the anchor. mean, spread: of the candidates' true differences to their champion.
    """
    rng = random.Random(seed)
    at, anchor, promoted = start, 0.0, 0
    for _ in range(candidates):
        effect = rng.gauss(mean, spread)
        apart = anchored and at != anchor
        world = World(effect=effect, anchor_effect=at - anchor + effect if apart else None)
        won, claims = _judged(world, rules, rng)
        if anchored:
            tried = replace(begun_canary(steps=rules.steps), anchor="m--v0" if apart else "m--v1")
            after = anchor_after(replace(tried, proven=claims), promoted=won)
            anchor = {tried.champion: at, tried.candidate: at + effect}.get(after, anchor)
        if won:
            at, promoted = at + effect, promoted + 1
    return Slide(end=at - start, promoted=promoted)


def from_above(rules: CanarySettings, seed: int) -> Slide:
    """Play twelve candidates of -0.03 after a champion that is `WON` above the anchor."""
    return slide(rules, seed=seed, anchored=True, start=WON, candidates=12, mean=-0.03, spread=0.0)


def _judged(world: World, rules: CanarySettings, rng: random.Random) -> tuple[bool, frozenset[str]]:
    """Return whether a candidate is promoted, and what its groups prove."""
    limits, quality = limits_of(rules), Quality()
    claims = frozenset[str]()
    for champion, anchor in differences(world, rng):
        one = Comparison(difference=champion, anchor_difference=anchor)
        quality = quality_of([one], limits, anchored=world.anchor_effect is not None, start=quality)
        claims |= proven(quality, rules)
        if quality.groups < rules.gate_prompts:
            continue
        if harm(quality) is not None:
            return False, claims
        if lacking(quality, claims, rules) is None:
            return True, claims
        if quality.groups >= rules.max_groups:
            return False, claims
    raise AssertionError("groups come without end")
