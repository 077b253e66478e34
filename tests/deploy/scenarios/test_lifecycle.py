"""Lives of candidates as Argo Rollouts and Flagger test them: states and the exact events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.records import BASE
from sidecar.store.models import BreakerTripRow
from support.adapter_endpoints import MODEL

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.scenarios.conftest import Stage

BEGUN = ["canary.loading", "canary.gating"]
PROMOTED = ["alias.champion", "canary.promoted"]


@pytest.mark.both_stores
async def test_abort_retry_promote(world: World, stage: Stage) -> None:
    """Argo `TestRolloutAbortRetryPromote`."""
    name = world.register(1)
    await stage.to_ramp(name)

    stage.act("abort", name)
    assert (world.canary(name).phase, world.table().canary) == ("rolled_back", None)
    await stage.tick(3)
    assert world.canary(name).phase == "rolled_back", "nothing is retried by itself"

    world.clock.now += 1.0
    retried = stage.start(name)
    assert retried.phase == "loading"
    await stage.tick(3)
    assert (world.canary(name).phase, world.canary(name).step) == ("ramping", 0)
    stage.act("promote", name)

    assert world.aliases() == {"champion": name, "previous": BASE}
    assert stage.events == [
        *(*BEGUN, "canary.ramping", "canary.rolled_back"),
        *(*BEGUN, "canary.ramping", *PROMOTED),
    ]


async def test_promote_full_from_a_pause(world: World, stage: Stage) -> None:
    """Argo `TestCanaryPromoteFull`."""
    name = world.register(1)
    await stage.to_ramp(name)
    stage.act("pause", name)
    world.clock.now += 1_000_000.0
    await stage.tick(3)
    assert (world.canary(name).phase, world.canary(name).paused) == ("ramping", True)

    stage.act("promote", name)

    assert (world.canary(name).phase, world.canary(name).paused) == ("promoted", False)
    assert world.table().champion == name
    assert stage.events == [*BEGUN, "canary.ramping", "canary.paused", *PROMOTED]


# Flagger's set


async def test_a_promotion_survives_a_vllm_that_dies_after_the_shift(
    world: World, stage: Stage
) -> None:
    """Flagger's promotion that fails after the traffic moved: nothing moves back to what was
    proven worse, and the champion is loaded when vLLM is there again."""
    name = world.register(1)
    await stage.to_ramp(name)
    await stage.pass_step(name)
    world.control.away = True
    await stage.pass_step(name)

    assert world.canary(name).phase == "promoted"
    world.control.away = False
    world.control.adapters.clear()
    await stage.tick(3)
    assert world.table().champion == name
    assert stage.events == [*BEGUN, "canary.ramping", "canary.ramping", *PROMOTED]


@pytest.mark.parametrize(
    "waits", ["for vLLM", "for prompts", "for the judge", "for users", "paused"]
)
async def test_a_rollback_is_honoured_in_every_waiting_state(
    world: World, stage: Stage, waits: str
) -> None:
    """Flagger's issues 1801 and 1432."""
    old = world.register(1)
    world.promote(old)
    name = world.register(2, values=(0.25, 0.5))
    if waits == "for vLLM":
        world.control.away = True
        await stage.tick()
    elif waits == "for prompts":
        await stage.tick(2)
    elif waits == "for the judge":
        world.judge.away = True
        world.hold_out(4)
        await stage.tick(3)
    else:
        await stage.to_ramp(name)
        if waits == "paused":
            stage.act("pause", name)
        await stage.tick()
    assert world.canary(name).active
    known = len(stage.events)

    done = stage.roll_back("base")

    assert done.ended_canary == world.canary(name).canary_id
    assert world.canary(name).phase == "rolled_back"
    assert (world.table().champion, world.table().canary) == (BASE, None)
    assert stage.events[known:] == [
        "canary.rolled_back",
        "alias.champion",
        *["adapter.banned"]
        * (2 if waits in ("for users", "paused") else 1),  # users met the second
        "learner.pause",
        "rollback",
    ]
    await stage.tick(3)
    assert not world.canary(name).active


@pytest.mark.parametrize("waits", ["loading", "gating", "ramping"])
async def test_the_guards_act_while_others_wait(world: World, stage: Stage, waits: str) -> None:
    """A breaker that trips is obeyed at the next tick, whatever else the canary waits for; before
    the ramp there is no traffic to take away."""
    name = world.register(1)
    world.judge.away = waits != "ramping"
    if waits == "ramping":
        await stage.to_ramp(name)
        world.judge.away = True
    elif waits == "gating":
        await stage.to_gate(name)
    else:
        world.control.away = True
        await stage.tick()
    found = world.canary(name)
    with world.database.write() as session:
        session.add(BreakerTripRow(model=MODEL, canary=name, salt=found.salt, reason="bad", at=1.0))

    await stage.tick()

    assert world.canary(name).phase == ("rolled_back" if waits == "ramping" else waits)
    assert world.table().canary is None
