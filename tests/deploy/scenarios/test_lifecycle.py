"""Lives of candidates as Argo Rollouts and Flagger test them: states and the exact events."""

from __future__ import annotations

import asyncio
import random

import pytest

from deploy.canary.gate import Gate
from deploy.engine.reconcile import Fleet
from deploy.evidence.quality import Group, Quality, add_group
from deploy.registry import proof_rule
from deploy.registry.canary_rule import MAX_PARTLY_LOADED
from deploy.registry.proof_rule import limits_of
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import BreakerTripRow, GateComparisonRow
from support.adapter_endpoints import MODEL
from support.fake_control import FakeControl
from tests.deploy.conftest import Api, World
from tests.deploy.scenarios.conftest import Stage

BEGUN = ["canary.loading", "canary.gating"]
PROMOTED = ["alias.champion", "canary.promoted"]


@pytest.mark.both_stores
async def test_abort_retry_promote(world: World, stage: Stage) -> None:
    """Argo `TestRolloutAbortRetryPromote`."""
    name = world.register(1)
    await world.to_ramp(name)

    world.act("abort", name)
    assert (world.canary(name).phase, world.table().canary) == ("rolled_back", None)
    await stage.tick(3)
    assert world.canary(name).phase == "rolled_back", "nothing is retried by itself"

    world.clock.now += 1.0
    retried = world.start(name)
    assert retried.phase == "loading"
    await stage.tick(3)
    assert (world.canary(name).phase, world.canary(name).step) == ("ramping", 0)
    world.act("promote", name)

    assert world.aliases() == {"champion": name, "previous": BASE}
    assert stage.events == [
        *(*BEGUN, "canary.ramping", "canary.rolled_back"),
        *(*BEGUN, "canary.ramping", *PROMOTED),
    ]


async def test_promote_full_from_a_pause(world: World, stage: Stage) -> None:
    """Argo `TestCanaryPromoteFull`."""
    name = world.register(1)
    await world.to_ramp(name)
    world.act("pause", name)
    world.clock.now += 1_000_000.0
    await stage.tick(3)
    assert (world.canary(name).phase, world.canary(name).paused) == ("ramping", True)

    world.act("promote", name)

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
    await world.to_ramp(name)
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
        await world.to_ramp(name)
        if waits == "paused":
            world.act("pause", name)
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
        await world.to_ramp(name)
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


# What judged groups decide: Kayenta's classifier suite and TensorZero's, asked of our rule.


RULES = CanarySettings(
    steps=(5_000,),
    step_min_s=10.0,
    turn_wait_s=0.0,
    step_min_exchanges=3,
    step_min_sessions=3,
    max_groups=600,
)


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
    await world.to_ramp(name)
    if ended == "promoted":
        await stage.pass_step(name)
        await stage.pass_step(name)
    else:
        world.act("abort", name)
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
    await world.to_ramp(name)
    gate: Gate = world.gate()
    canary = world.canary(name)
    world.act("abort", name)
    events = stage.events

    await gate.shadow(canary)
    await stage.tick(3)

    assert world.canary(name).phase == "rolled_back"
    assert stage.events == events


# the split of traffic


# Replicas that fail to load, and many callers of the admin API at once.


REPLICAS = 16
WRITERS = 50


async def test_a_load_that_fails_on_one_of_two_replicas_moves_no_alias(
    world: World, stage: Stage
) -> None:
    name = world.register(1)
    world.others["http://second"] = bad = FakeControl()
    bad.fails_to_load = 1_000

    await stage.tick()
    assert world.canary(name).reason == (
        "waiting for vLLM: http://second: 500 out of memory (1 other replica proved it live: mend "
        "that vLLM, or take it out of serving.upstreams)"
    )
    while world.canary(name).active:
        world.clock.now += 16.0
        await stage.tick()

    assert world.adapter(name).state == "retired"
    assert 1_000 - bad.fails_to_load == MAX_PARTLY_LOADED, "finite tries"
    assert world.aliases() == {"champion": BASE, "previous": BASE}
    assert stage.events == ["canary.loading", "canary.inconclusive"], "nothing is banned"
    assert world.start(name).phase == "loading", "once the vLLM is mended"


@pytest.mark.parametrize("fault", ["no effect", "no such path", "says it has it"])
async def test_one_sick_vllm_costs_no_candidate_and_its_mending_lets_it_go_on(
    world: World, stage: Stage, fault: str
) -> None:
    name = world.register(1)
    world.others["http://second"] = sick = FakeControl()
    if fault == "no effect":
        sick.reach[name] = 0.0
    elif fault == "no such path":
        sick.refuses[name] = "no adapter found for that path"
    else:
        sick.unlisted.add(name)
    for _ in range(30):
        await stage.tick()
        world.clock.now += 64.0
    assert world.canary(name).phase == "loading"
    assert "http://second: " in str(world.canary(name).reason)
    assert world.table().canary is None

    world.others["http://second"] = FakeControl()
    world.clock.now += 128.0
    await stage.tick()

    assert world.canary(name).phase == "gating"
    assert stage.events == ["canary.loading", "canary.gating"]


async def test_the_sound_vllm_may_fail_once_too_while_the_sick_one_is_waited_for(
    world: World, stage: Stage
) -> None:
    name = world.register(1)
    world.others["http://second"] = sick = FakeControl()
    sick.fails_to_load = 1_000
    for _ in range(10):
        await stage.tick()
        world.clock.now += 128.0
    world.control.garbles = 3

    await stage.tick()

    assert world.canary(name).phase == "loading"


async def reconcile(fleet: Fleet) -> None:
    await asyncio.gather(*(one.reconcile() for one in fleet.reconcilers.values()))


async def test_sixteen_replicas_that_come_and_go_end_with_what_is_decided(
    world: World, stage: Stage
) -> None:
    """Each round some are killed (and forget all), some are away, one is added, one cannot load."""
    controls = {f"http://r{number}": FakeControl() for number in range(REPLICAS)}
    old = world.register(1)
    world.promote(old)
    broken = controls["http://r7"]
    broken.refuses[old] = "no memory"
    fleet = world.fleet(controls)
    for turn in range(12):
        for number, control in enumerate(controls.values()):
            control.away = (number + turn) % 5 == 0
            if (number + turn) % 3 == 0:
                control.adapters.clear()
        if turn == 6:
            controls["http://added"] = FakeControl()
            fleet = world.fleet(controls)  # settings name it, so control started again
        await reconcile(fleet)
    for control in controls.values():
        control.away = False

    await reconcile(fleet)

    assert all(set(one.adapters) == {old} for one in controls.values() if one is not broken)
    assert broken.adapters == {}, "one that cannot load keeps nobody else from it"
    assert old in fleet.view().refused
    broken.refuses.clear()
    await reconcile(fleet)
    assert fleet.view().loaded == {old}


async def test_a_candidate_is_routable_only_when_every_replica_that_answers_has_proven_it(
    world: World, stage: Stage
) -> None:
    world.others |= {f"http://r{number}": FakeControl() for number in range(REPLICAS - 1)}
    name = world.register(1)
    for control in world.others.values():
        control.reach[name] = 0.0  # loaded, and without effect there
    world.hold_out(4)

    await stage.tick(4)
    assert world.canary(name).phase == "loading"
    assert world.table().canary is None

    world.control.reach[name] = 0.0  # the last one that had shown one
    world.clock.now += 2.0
    await stage.tick()

    assert world.adapter(name).state == "rejected"
    assert stage.events == ["canary.loading", "adapter.banned", "canary.rolled_back"]


async def test_a_rejected_candidate_stays_on_no_replica(world: World, stage: Stage) -> None:
    controls = {f"http://r{number}": FakeControl() for number in range(REPLICAS)}
    world.others |= controls
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.25, f"says {MODEL}": 0.75}
    world.hold_out(4)
    await stage.tick(3)
    assert all(name in one.adapters for one in controls.values())
    fleet = world.fleet(controls)
    controls["http://r3"].fails_to_unload = 1

    await reconcile(fleet)
    await reconcile(world.fleet(controls))  # a control that was killed in between

    assert all(one.adapters == {} for one in controls.values())


@pytest.mark.both_stores
async def test_fifty_racing_writers_and_one_rollback_wins_at_once(world: World, api: Api) -> None:
    """No precondition is asked of a safety verb, so none of the callers is turned away."""
    old, new = world.register(1), world.register(2, values=(0.25, 0.5))
    world.promote(old)
    world.promote(new)
    known = len(world.actions())

    replies = await asyncio.gather(
        *(api.post("/rollback", {"to": "v1", "reason": f"r{n}"}) for n in range(WRITERS))
    )

    assert {one.status_code for one in replies} == {200}
    assert [one.json()["changed"] for one in replies].count(True) == 1
    assert {one.json()["to"] for one in replies} == {old}
    assert world.actions()[known:] == [
        "alias.champion",
        "adapter.banned",
        "learner.pause",
        "rollback",
    ]
    assert world.table().champion == old


async def test_of_fifty_racing_promotions_one_wins_and_the_others_are_told(
    world: World, stage: Stage, api: Api
) -> None:
    name = world.register(1)
    await world.to_ramp(name)
    canary = world.canary(name)
    path, etag = f"/canaries/{canary.canary_id}/promote", f'"g{canary.generation}"'

    replies = await asyncio.gather(
        *(api.post(path, {"reason": "x"}, if_match=etag) for _ in range(WRITERS))
    )
    missing = await api.post(path, {"reason": "x"})

    statuses = [one.status_code for one in replies]
    assert statuses.count(200) == 1
    assert set(statuses) == {200, 412}
    assert missing.status_code == 428
    assert all(
        one.headers["content-type"] == "application/problem+json"
        for one in (*replies, missing)
        if one.status_code != 200
    )
    assert stage.events[-2:] == ["alias.champion", "canary.promoted"]
    assert stage.events.count("canary.promoted") == 1
