"""Play one canary from its gate to its end, by the product's own rule and state.

Only time, traffic and judge are simulated: `decide`, `Live`, `add_group` and the records are those
that control uses.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks.canary.begun import begun_canary
from benchmarks.canary.traffic import Reply, World, differences, reply_to, sessions, took_s
from deploy.evidence.live import InOrder, Live, Turn
from deploy.evidence.quality import FLAWS, OF_GROUPS, Fault, Quality
from deploy.records import Canary
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
from deploy.registry.proof_rule import DOUBTED, SPLIT_LEVEL, limits_of, proven, ratios_of, threshold
from sidecar.routing.table import BUCKETS
from sidecar.settings import Canary as CanarySettings

TICK_S = 30.0
"""Simulated time between two looks of the rule. The evidence looks at every observation anyway."""
STORED_S = 1.0
"""Simulated time from the end of a reply to when control can read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a canary ended."""

    phase: str
    reason: str
    groups: int
    canary_sessions: int
    claims: frozenset[str]
    held: bool
    """Whether the split of the traffic was ever taken for wrong."""
    canary: Canary


@dataclass(slots=True)
class History:
    """What both arms did so far, for rules that are compared with the product's."""

    canary: int = 0
    canary_bad: int = 0
    champion: int = 0
    champion_bad: int = 0
    scores: list[float] = field(default_factory=list)

    def reply(self, reply: Reply) -> None:
        failed = "failed" in reply.bad
        if reply.canary:
            self.canary, self.canary_bad = self.canary + 1, self.canary_bad + failed
        else:
            self.champion, self.champion_bad = self.champion + 1, self.champion_bad + failed


Watch = Callable[[History], None]


def nobody(_: History) -> None:
    """Watch nothing."""


def play(world: World, rules: CanarySettings, *, seed: int, watch: Watch = nobody) -> Ended:
    """Play one canary.

    watch: is told after each look what both arms did, until the canary ends.
    """
    rng = random.Random(seed)
    scores = differences(world, rng)
    limits, live, history = limits_of(rules), Live(ratios_of()), History()
    quality, claims = Quality(), frozenset[str]()
    canary = begun_canary(steps=rules.steps, number=seed)

    def judge() -> None:
        nonlocal quality, claims
        one = compared(world, scores, rng)
        anchored = world.anchor_effect is not None
        quality = quality_of([one], limits, anchored=anchored, start=quality)
        claims |= proven(quality, rules)
        if one.difference is not None:
            history.scores.append(one.difference)

    now = 0.0
    while canary.phase == "gating":
        judge()
        watch(history)
        canary = _decided(canary, _gate(quality, history, rules), rules, now)
    due = [(one.at, place, one) for place, one in enumerate(sessions(world, rng))]
    heapq.heapify(due)
    order, place = InOrder(rules.turn_wait_s), len(due)
    judged, seen = quality.groups + quality.unknown, 0
    units: set[str] = set()
    while canary.active:
        now += TICK_S
        while due and due[0][0] < now:
            at, _, request = heapq.heappop(due)
            reply = reply_to(request, world, salt=canary.salt, weight_bp=canary.weight_bp, rng=rng)
            weight = canary.weight_bp / BUCKETS
            turn = Turn(
                unit=request.key,
                canary=reply.canary,
                weight=weight,
                bad=reply.bad,
                caller=request.key,
                shared=reply.nobody,
            )
            spent_s = took_s(world, canary=reply.canary, rng=rng)
            ends, place = at + spent_s, place + 1
            order.add(turn, started_at=at, stored_at=ends + STORED_S, took_s=spent_s, place=place)
            if request.turns > 1:
                then = ends + world.turn_gap_s
                following = replace(request, at=then, turns=request.turns - 1)
                heapq.heappush(due, (then, place, following))
            history.reply(reply)
            if reply.canary:
                seen += 1
                units.add(request.key)
        live.read(order.take(now))
        while quality.groups + quality.unknown < judged + rules.groups_per_hour * now / 3_600.0:
            judge()
        watch(history)
        evidence = RampEvidence(
            candidate=ArmCounts(replies=seen, errors=0, short=0),
            champion=ArmCounts(replies=history.champion, errors=0, short=0),
            sessions=len(units),
            guards=live.guards,
            mismatch=live.mismatch,
            quality=quality,
            proven=claims,
        )
        step = canary.step
        canary = _decided(canary, evidence, rules, now)
        if canary.step != step:
            seen, units = 0, set()
    return Ended(
        phase=canary.phase,
        reason=canary.reason or "",
        groups=quality.groups,
        canary_sessions=live.canary_units,
        claims=claims,
        held=live.mismatch >= threshold(SPLIT_LEVEL),
        canary=canary,
    )


def compared(
    world: World, scores: Iterator[tuple[float, float | None]], rng: random.Random
) -> Comparison:
    """Draw one group: the difference of its scores, its flaws, or whose answers it lost."""
    champion, anchor = next(scores)
    arms: tuple[Fault, ...] = ("candidate", "champion")
    lost = [arm for arm in arms if world.lost and rng.random() < world.lost]
    if lost:
        return Comparison(difference=None, fault=lost[0] if len(lost) == 1 else "unknown")
    flaws = {kind: _excess(world, rng) for kind in (*FLAWS, *OF_GROUPS)}
    return Comparison(difference=champion, anchor_difference=anchor, flaws=flaws)


def _excess(world: World, rng: random.Random) -> float:
    """Draw the candidate's share of flawed answers minus the champion's, of two answers each."""
    if not world.flawed:
        return 0.0
    flawed = [rng.random() < world.flawed for _ in range(4)]
    return (sum(flawed[:2]) - sum(flawed[2:])) / 2.0


def _gate(quality: Quality, history: History, rules: CanarySettings) -> GateEvidence:
    made = [Comparison(difference=one) for one in history.scores]
    quick = made if rules.promote_on == "quick" else made[:1]  # only the quick rule reads it
    return GateEvidence(
        prompts=DOUBTED * rules.gate_prompts,
        pending=1,  # there are more than the gate can want
        verdict=judge_gate(quick, rules, seed=1),
        quality=quality,
    )


def _decided(
    canary: Canary, evidence: GateEvidence | RampEvidence, rules: CanarySettings, now: float
) -> Canary:
    decision = decide(canary, evidence, rules, now)
    if not isinstance(decision, Move):
        return canary
    return replace(
        canary, phase=decision.to, step=decision.step, step_started_at=now, reason=decision.reason
    )
