"""Replicas that fail to load, and many callers of the admin API at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from deploy.engine.reconcile import Fleet, Reconciler
from deploy.registry.canary_rule import MAX_PARTLY_LOADED
from sidecar.records import BASE
from support.adapter_endpoints import MODEL
from support.fake_control import FakeControl

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World
    from tests.deploy.scenarios.conftest import Stage

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
    assert stage.start(name).phase == "loading", "once the vLLM is mended"


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


def keepers(world: World, controls: dict[str, FakeControl]) -> Fleet:
    return Fleet(
        {
            url: Reconciler(
                database=world.database,
                control=control,
                model=MODEL,
                max_loras=4,
                replica=url,
                clock=world.clock,
            )
            for url, control in controls.items()
        }
    )


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
    fleet = keepers(world, controls)
    for turn in range(12):
        for number, control in enumerate(controls.values()):
            control.away = (number + turn) % 5 == 0
            if (number + turn) % 3 == 0:
                control.adapters.clear()
        if turn == 6:
            controls["http://added"] = FakeControl()
            fleet = keepers(world, controls)  # settings name it, so control started again
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
    fleet = keepers(world, controls)
    controls["http://r3"].fails_to_unload = 1

    await reconcile(fleet)
    await reconcile(keepers(world, controls))  # a control that was killed in between

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
    await stage.to_ramp(name)
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
