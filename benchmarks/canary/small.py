"""Canaries of sites with few sessions a day, by the product's own rule: how long does one take?

A group needs a session in which the candidate did not answer: a held-out one of before, or one that
begins while the canary runs and is not its own. So the traffic bounds both the exposure and the
groups, and what is decided takes days. A candidate that ends inconclusive is tried again, with the
groups of its earlier tries.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from statistics import quantiles

from benchmarks.canary.begun import begun_canary
from benchmarks.canary.traffic import DAY_S, World, differences
from deploy.evidence.live import Live, Turn
from deploy.evidence.quality import Quality
from deploy.registry.canary_rule import (
    ArmCounts,
    Comparison,
    GateEvidence,
    Move,
    RampEvidence,
    decide,
    judge_gate,
    quality_of,
)
from deploy.registry.proof_rule import limits_of, proven, ratios_of
from sidecar.routing.assignment import bucket
from sidecar.routing.table import BUCKETS
from sidecar.settings import Canary as CanarySettings

HELD_OUT = 0.2
"""Share of the sessions that are held out, as the settings have it."""
RECORDED_DAYS = 30.0
"""Days of records before the candidate."""
MOST_DAYS = 60.0
LOOK_S = 3_600.0
"""Simulated time between two looks of the rule."""
TURNS = 6
"""A session has one to so many requests."""
BAD = 0.05
"""Rate of bad turns of both arms, for each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a candidate."""

    phase: str
    """Of its last canary: `promoted`, `rolled_back`, or `inconclusive` when the days are over."""
    days: float
    """Days from its first canary to that."""
    groups: int
    tries: int


class _Site:
    """One candidate at one site. Time is in seconds since its first canary began."""

    def __init__(
        self, a_day: float, effect: float, rules: CanarySettings, seed: int, recorded_days: float
    ) -> None:
        self.rng = random.Random(f"small-{a_day}-{effect}-{seed}")
        self.rules, self.a_day, self.now = rules, a_day, 0.0
        self.scores = differences(World(effect=effect), self.rng)
        self.stock = round(HELD_OUT * a_day * recorded_days)
        """Sessions that may be judged and are not."""
        self.quality, self.claims, self.begun = Quality(), frozenset[str](), 0
        self.next_at = self.rng.expovariate(a_day / DAY_S)

    def judge(self, most: int) -> None:
        for _ in range(min(most, self.stock)):
            self.stock -= 1
            one = Comparison(difference=next(self.scores)[0])
            self.quality = quality_of(
                [one], limits_of(self.rules), anchored=False, start=self.quality
            )
            self.claims |= proven(self.quality, self.rules)

    def sessions(self) -> list[str]:
        """Return the keys of the sessions that began since the last look."""
        found = []
        while self.next_at < self.now:
            self.begun += 1
            found.append(f"s{self.begun}")
            self.next_at += self.rng.expovariate(self.a_day / DAY_S)
        return found

    def turns(self, key: str, canary: bool, weight: float) -> list[Turn]:
        kinds = ("failed", "cut", "short", "invalid", "evasive")
        return [
            Turn(
                unit=key,
                canary=canary,
                weight=weight,
                bad=frozenset(kind for kind in kinds if self.rng.random() < BAD),
            )
            for _ in range(self.rng.randint(1, TURNS))
        ]


def tried(
    a_day: float,
    effect: float,
    rules: CanarySettings,
    seed: int,
    *,
    recorded_days: float = RECORDED_DAYS,
) -> Tried:
    """Try one candidate until it is promoted, rolled back, or `MOST_DAYS` are over."""
    site = _Site(a_day, effect, rules, seed, recorded_days)
    tries, phase = 0, "inconclusive"
    while phase == "inconclusive" and site.now < MOST_DAYS * DAY_S:
        tries += 1
        phase = _canary(site, number=seed * 1_000 + tries)
    return Tried(phase=phase, days=site.now / DAY_S, groups=site.quality.groups, tries=tries)


def _canary(site: _Site, number: int) -> str:
    """Play one canary. Returns: its last phase."""
    rules, carried = site.rules, site.quality.groups
    canary = replace(begun_canary(steps=rules.steps, number=number), step_started_at=site.now)
    live, began = Live(ratios_of()), site.now
    seen, units = 0, 0
    while canary.active and site.now < MOST_DAYS * DAY_S:
        evidence: GateEvidence | RampEvidence
        if canary.phase == "gating":
            site.judge(1)
            evidence = GateEvidence(
                prompts=site.stock + site.quality.groups,
                pending=site.stock,
                verdict=judge_gate([], rules, seed=1),
                quality=site.quality,
            )
            site.now += 0.0 if site.stock else LOOK_S
        else:
            site.now += LOOK_S
            weight = canary.weight_bp / BUCKETS
            for key in site.sessions():
                its = bucket(canary.salt, key) < canary.weight_bp
                turns = site.turns(key, its, weight)
                live.read(turns)
                seen, units = seen + its * len(turns), units + its
                site.stock += not its
            allowed = rules.gate_prompts + rules.groups_per_hour * (site.now - began) / 3_600.0
            site.judge(round(allowed) - site.quality.groups + carried)
            evidence = RampEvidence(
                candidate=ArmCounts(replies=seen, errors=0, short=0),
                champion=ArmCounts(replies=seen, errors=0, short=0),
                sessions=units,
                guards=live.guards,
                mismatch=live.mismatch,
                quality=site.quality,
                carried=carried,
                proven=site.claims,
            )
        decision = decide(canary, evidence, rules, site.now)
        if isinstance(decision, Move):
            if (decision.to, decision.step) != (canary.phase, canary.step):
                seen, units = 0, 0
            canary = replace(
                canary,
                phase=decision.to,
                step=decision.step,
                step_started_at=site.now,
                reason=decision.reason,
            )
    return canary.phase if not canary.active else "inconclusive"


def summary(played: list[Tried], within_days: float) -> dict[str, float]:
    """Return the shares of the ends, and the days of those that were promoted."""
    count = len(played)
    days = sorted(one.days for one in played if one.phase == "promoted")
    return {
        "promoted": len(days) / count,
        "in_time": sum(one <= within_days for one in days) / count,
        "rolled_back": sum(one.phase == "rolled_back" for one in played) / count,
        "days": quantiles(days, n=10)[4] if len(days) > 1 else float("nan"),
        "days_90": quantiles(days, n=10)[8] if len(days) > 1 else float("nan"),
        "groups": sorted(one.groups for one in played)[count // 2],
    }
