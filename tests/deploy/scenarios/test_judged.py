"""What judged groups decide: Kayenta's classifier suite and TensorZero's, asked of our rule."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from deploy.canary.gate import Gate
from deploy.evidence.live import Live
from deploy.evidence.quality import Fault, Group, Quality, add_group
from deploy.registry import proof_rule
from deploy.registry.canary_rule import ArmCounts, Decision, Move, RampEvidence, decide
from deploy.registry.proof_rule import limits_of, ratios_of
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import GateComparisonRow
from support.made_canary import made_canary

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.scenarios.conftest import Stage

RULES = CanarySettings(
    steps=(5_000,),
    step_min_s=10.0,
    turn_wait_s=0.0,
    step_min_exchanges=3,
    step_min_sessions=3,
    max_groups=600,
)
CANARY = made_canary()


def groups(
    *differences: float | None, fault: Fault | None = None, rules: CanarySettings = RULES
) -> Quality:
    """Each group's mean score of the candidate minus the champion's, who is the anchor too."""
    quality = Quality()
    for one in differences:
        group = Group(champion=one, anchor=one, fault=fault if one is None else None)
        quality = add_group(quality, group, limits_of(rules))
    return quality


def ends(quality: Quality, *, rules: CanarySettings = RULES, live: Live | None = None) -> Decision:
    """What is decided after the last step."""
    counts = ArmCounts(replies=50, errors=0, short=0)
    seen = Live(ratios_of()) if live is None else live
    evidence = RampEvidence(
        candidate=counts, champion=counts, sessions=50, quality=quality, guards=seen.guards
    )
    return decide(CANARY, evidence, rules, 20.0)


def phase(decision: Decision) -> str:
    return decision.to if isinstance(decision, Move) else "held"


def noise(mean: float, count: int, *, seed: int = 3) -> list[float]:
    rng = random.Random(seed)
    return [max(-1.0, min(1.0, rng.gauss(mean, 0.35))) for _ in range(count)]


# Kayenta


def test_a_smaller_margin_takes_more_groups() -> None:
    strict = RULES.model_copy(update={"margin": 0.02, "anchor_margin": 0.02})

    assert needed(strict) > needed(RULES)


def needed(rules: CanarySettings) -> int:
    """Groups of an equal candidate until it is promoted."""
    quality = Quality()
    for number, difference in enumerate(noise(0.0, 5_000), 1):
        group = Group(champion=difference, anchor=difference)
        quality = add_group(quality, group, limits_of(rules))
        if proof_rule.lacking(quality, frozenset(), rules) is None:
            return number
    raise AssertionError("never")


@pytest.mark.parametrize("ended", ["promoted", "rolled_back"])
async def test_a_late_score_flips_no_verdict(world: World, stage: Stage, ended: str) -> None:
    """TensorZero's PR 4163: there, new data bring a stopped experiment back."""
    name = world.register(1)
    await stage.to_ramp(name)
    if ended == "promoted":
        await stage.pass_step(name)
        await stage.pass_step(name)
    else:
        stage.act("abort", name)
    events = stage.events
    with world.database.write() as session:
        for row in session.query(GateComparisonRow):
            row.difference = -1.0 if ended == "promoted" else 1.0
    for number in range(50):
        world.serve(
            f"late-{number}", adapter=name, arm="canary", status=500, outcome="upstream_error"
        )

    await stage.tick(5)

    assert world.canary(name).phase == ended
    assert world.aliases()["champion"] == (name if ended == "promoted" else "base")
    assert stage.events == events


async def test_a_group_that_ends_after_the_verdict_is_of_no_consequence(
    world: World, stage: Stage
) -> None:
    """The judge answers a shadow's group when an operator has ended the canary meanwhile."""
    name = world.register(1)
    await stage.to_ramp(name)
    gate: Gate = world.gate()
    canary = world.canary(name)
    stage.act("abort", name)
    events = stage.events

    await gate.shadow(canary)
    await stage.tick(3)

    assert world.canary(name).phase == "rolled_back"
    assert stage.events == events


# the split of traffic
