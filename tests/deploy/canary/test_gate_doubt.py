"""The gate judges more prompts while something speaks against a candidate without proving harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select

from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import GateComparisonRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World

PROMPTS = 10


@pytest.fixture
def rules() -> CanarySettings:
    return CanarySettings(
        gate_prompts=PROMPTS,
        gate_answers=1,
        gate_min_prompts=PROMPTS,
        steps=(2_000,),
        step_min_s=10.0,
        turn_wait_s=0.0,
    )


async def gated(world: World, *, held_out: int, worse_by: float) -> tuple[str, int]:
    """Play until the gate is left. Returns: the candidate, and the prompts that were judged."""
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.5 - worse_by / 2, "says m": 0.5 + worse_by / 2}
    world.hold_out(held_out)
    controller = world.controller(gate=world.gate())
    for _ in range(60):
        await controller.tick()
        world.clock.now += 1.0
        if world.canary(name).phase not in ("loading", "gating"):
            break
    with world.database.read() as session:
        judged = session.scalar(select(func.count()).select_from(GateComparisonRow)) or 0
    return name, judged


@pytest.mark.both_stores
async def test_a_bad_candidate_that_few_prompts_do_not_prove_bad_meets_no_user(
    world: World,
) -> None:
    name, judged = await gated(world, held_out=60, worse_by=0.4)

    canary = world.canary(name)
    assert (canary.phase, world.table().canary) == ("rolled_back", None)
    assert (canary.reason or "").startswith("gate: worse than the champion in ")
    assert PROMPTS < judged <= 2 * PROMPTS


async def test_a_candidate_that_nothing_speaks_against_is_judged_on_no_more(world: World) -> None:
    name, judged = await gated(world, held_out=60, worse_by=0.1)

    assert (world.canary(name).phase, judged) == ("ramping", PROMPTS)


async def test_it_goes_on_when_there_is_no_further_prompt(world: World) -> None:
    """The ramp judges prompts of users' sessions too."""
    name, judged = await gated(world, held_out=PROMPTS, worse_by=0.4)

    assert (world.canary(name).phase, judged) == ("ramping", PROMPTS)


async def test_the_gate_says_why_it_judges_more(world: World) -> None:
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.3, "says m": 0.7}
    world.hold_out(60)
    controller, reasons = world.controller(gate=world.gate()), []
    for _ in range(20):
        await controller.tick()
        world.clock.now += 1.0
        reasons.append(world.canary(name).reason or "")

    said = "more than usual: worse than the champion, evidence "
    assert any(f"of 30 prompts compared; {said}" in one for one in reasons), reasons


async def test_a_doubt_that_further_prompts_clear_up_lets_it_pass(world: World) -> None:
    name = world.register(1)
    world.sampler.finish_reasons[name] = "length"
    world.hold_out(60)
    controller = world.controller(gate=world.gate())
    for _ in range(60):
        await controller.tick()
        world.clock.now += 1.0
        doubted = "more than usual: more cut short" in (world.canary(name).reason or "")
        if doubted and name in world.sampler.finish_reasons:
            del world.sampler.finish_reasons[name]
            world.sampler.finish_reasons["m"] = "length"
        if world.canary(name).phase not in ("loading", "gating"):
            break

    assert world.canary(name).phase == "ramping"
    assert name not in world.sampler.finish_reasons, "it was never doubted"
