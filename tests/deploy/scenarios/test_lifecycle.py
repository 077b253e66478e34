"""Lives of candidates as Argo Rollouts and Flagger test them: states and the exact events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.errors import TransitionError
from deploy.registry import aliases
from deploy.registry.canary_rule import SLOWEST
from learner.runs.publish import find_published
from sidecar.records import BASE
from sidecar.routing.assignment import CompiledRouting
from sidecar.store.models import BreakerTripRow
from support.adapter_endpoints import MODEL

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.scenarios.conftest import Stage

BEGUN = ["canary.loading", "canary.gating"]
PROMOTED = ["alias.champion", "canary.promoted"]
LATER_PROMOTED = ["alias.champion", "alias.previous", "canary.promoted"]


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


async def test_promote_full_in_mid_analysis_is_refused_at_the_gate(
    world: World, stage: Stage
) -> None:
    name = world.register(1)
    await stage.to_gate(name)

    with pytest.raises(TransitionError, match="only a ramping one can be promoted"):
        stage.act("promote", name)

    assert world.canary(name).phase == "gating"
    assert stage.events == BEGUN


async def test_promote_full_in_mid_ramp_makes_no_further_comparison(
    world: World, stage: Stage
) -> None:
    name = world.register(1)
    await stage.to_ramp(name)
    asked = len(world.judge.conversations)

    stage.act("promote", name)
    await stage.tick(3)

    assert len(world.judge.conversations) == asked
    assert stage.events == [*BEGUN, "canary.ramping", *PROMOTED]


async def test_promote_full_after_an_abort_is_refused(world: World, stage: Stage) -> None:
    name = world.register(1)
    await stage.to_ramp(name)
    stage.act("abort", name)

    with pytest.raises(TransitionError):
        stage.act("promote", name)

    assert world.aliases()["champion"] == BASE
    assert stage.events == [*BEGUN, "canary.ramping", "canary.rolled_back"]


async def test_an_inconclusive_one_says_why_and_is_tried_past_it_once(
    world: World, stage: Stage
) -> None:
    """Argo `TestCanaryInconclusiveBackgroundAnalysis` and its issue 261: it does not end so again
    by itself as soon as a person goes on."""
    name = world.register(1)
    await stage.to_ramp(name)
    world.clock.now += SLOWEST * world.rules.step_max_s
    await stage.tick()
    assert world.canary(name).phase == "inconclusive"
    assert world.canary(name).reason == ("step 1: 0 of 3 exchanges and 0 of 1 session in 28000 s")
    assert world.aliases()["champion"] == BASE, "the champion stays"
    await stage.tick(3)

    stage.start(name)
    await stage.tick(3)
    await stage.pass_step(name)
    await stage.pass_step(name)

    assert world.canary(name).phase == "promoted"
    assert stage.events == [
        *(*BEGUN, "canary.ramping", "canary.inconclusive"),
        *(*BEGUN, "canary.ramping", "canary.ramping", *PROMOTED),
    ]


async def test_a_resume_goes_past_a_pause_once(world: World, stage: Stage) -> None:
    name = world.register(1)
    await stage.to_ramp(name)
    stage.act("pause", name)
    stage.act("resume", name)
    await stage.tick(3)
    assert not world.canary(name).paused

    with pytest.raises(TransitionError, match="is not paused"):
        stage.act("resume", name)

    assert stage.events == [*BEGUN, "canary.ramping", "canary.paused", "canary.resumed"]


async def test_a_rollback_inside_the_window_runs_no_analysis(world: World, stage: Stage) -> None:
    """Argo `TestRollbackAnalysisWithinWindow`: the window is every version that was champion."""
    old, new = world.register(1), world.register(2, values=(0.25, 0.5))
    world.promote(old)
    world.promote(new)
    known = len(stage.events)
    world.hold_out(4)

    done = stage.roll_back("v1")
    await stage.tick(3)

    assert (done.before, done.after) == (new, old)
    assert world.judge.conversations == []
    assert world.sampler.requests == []
    assert world.control.calls == []
    assert stage.events[known:] == [
        "alias.champion",
        "adapter.banned",
        "learner.pause",
        "rollback",
    ]


async def test_outside_the_window_only_a_canary_leads_there(world: World, stage: Stage) -> None:
    """Argo `TestRollbackAnalysisOutsideWindow`: what never was champion is analysed."""
    never = world.register(1)
    await stage.to_ramp(never)
    stage.act("abort", never)
    asked = len(world.judge.conversations)

    with pytest.raises(TransitionError, match="has never been champion"):
        stage.roll_back("v1")
    stage.start("v1")
    await stage.tick(3)

    assert world.canary(never).phase == "ramping"
    assert len(world.judge.conversations) > asked
    assert world.aliases()["champion"] == BASE


# Flagger's set


async def test_the_first_start_begins_nothing(world: World, stage: Stage) -> None:
    await stage.tick(3)

    assert world.aliases() == {"champion": BASE, "previous": BASE}
    assert world.table().canary is None
    assert stage.events == []


async def test_a_new_revision_waits_and_the_newest_of_them_is_next(
    world: World, stage: Stage
) -> None:
    """Flagger starts anew on the newest; here the running one keeps its evidence."""
    first = world.register(1)
    await stage.to_ramp(first)
    second = world.register(2)
    await stage.tick()
    third = world.register(3)
    await stage.tick()
    assert world.canary(first).phase == "ramping"

    stage.act("abort", first)
    await stage.tick(2)

    assert world.adapter(second).state == "retired"
    assert world.canary(third).phase == "gating"


async def test_the_analysis_of_the_ramp_can_be_skipped_by_hand(world: World, stage: Stage) -> None:
    name = world.register(1)
    await stage.to_ramp(name)

    stage.act("skip_step", name)
    await stage.tick()

    assert world.canary(name).step == 1
    assert world.table().canary_weight_bp == 5_000
    assert stage.events[:3] == [*BEGUN, "canary.ramping"]
    assert stage.events[-1] == "canary.ramping"


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


async def test_the_bytes_of_the_champion_start_no_canary(world: World, stage: Stage) -> None:
    """Flagger `test-lifecycle.sh`: a reverted spec is no new revision."""
    name = world.register(1)
    world.promote(name)
    known = len(stage.events)
    digest = world.adapter(name).digest

    with world.database.read() as session:
        same = find_published(session, MODEL, digest)
    with pytest.raises(TransitionError, match="is champion"):
        stage.start(name)
    await stage.tick(3)

    assert same is not None
    assert same.adapter == name, "a run or an import that made the same bytes finds the version"
    assert stage.events[known:] == []


async def test_a_rejected_digest_is_refused(world: World, stage: Stage) -> None:
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.25, f"says {MODEL}": 0.75}
    world.hold_out(4)
    await stage.tick(3)
    assert world.adapter(name).state == "rejected"

    with pytest.raises(TransitionError, match="these files are banned"):
        stage.start(name)
    with world.database.read() as session, pytest.raises(TransitionError):
        aliases.refuse(session, MODEL, world.adapter(name).digest)

    assert stage.events == [*BEGUN, "adapter.banned", "canary.rolled_back"]


async def test_two_clients_keep_their_arms_while_the_weight_grows_and_go_back_together(
    world: World, stage: Stage
) -> None:
    """Flagger `verify_session_affinity.go`, in both directions, with two clients in parallel."""
    name = world.register(1)
    await stage.to_ramp(name)

    def arms() -> dict[str, str]:
        table = CompiledRouting(world.table())
        return {key: table.routes(key)[0].adapter for key in keys}

    keys = [f"client-{number}" for number in range(200)]
    first = arms()
    on_canary = [key for key in keys if first[key] == name]
    on_champion = [key for key in keys if first[key] == BASE]
    assert 20 <= len(on_canary) <= 65, "20 of 100"
    await stage.pass_step(name)
    second = arms()
    assert all(second[key] == name for key in on_canary), "nobody leaves the canary"
    assert [second[key] for key in on_champion].count(BASE) >= 60
    assert arms() == second, "a second request of each client meets the same arm"

    stage.act("abort", name)

    assert set(arms().values()) == {BASE}
