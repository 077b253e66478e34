"""Several replicas: each is kept on its own, and a canary needs those that answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from deploy.engine.reconcile import ALTERED_RETRY_S, Fleet, Reconciler
from deploy.engine.vllm_control import Probe
from support.fake_control import FakeControl

if TYPE_CHECKING:
    from tests.deploy.conftest import World

A, B = "http://a", "http://b"


@pytest.fixture
def controls(world: World) -> dict[str, FakeControl]:
    """Two fakes of vLLM; the world's own is the first."""
    world.others = {B: FakeControl()}
    return {A: world.control, B: world.others[B]}


@pytest.fixture
def fleet(world: World, controls: dict[str, FakeControl]) -> Fleet:
    return Fleet(
        {
            url: Reconciler(
                database=world.database,
                control=control,
                model="m",
                max_loras=4,
                replica=url,
                clock=world.clock,
            )
            for url, control in controls.items()
        }
    )


async def reconcile(fleet: Fleet) -> None:
    for one in fleet.reconcilers.values():
        await one.reconcile()


async def test_adapters_are_loaded_on_every_replica(
    world: World, fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    world.promote(name)

    await reconcile(fleet)

    assert [set(control.adapters) for control in controls.values()] == [{name}, {name}]
    assert fleet.view().loaded == {name}


async def test_a_replica_that_is_down_holds_nobody_up_and_is_mended_when_it_is_back(
    world: World, fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    world.promote(name)
    controls[A].away = True

    await reconcile(fleet)

    assert set(controls[B].adapters) == {name}
    view = fleet.view()
    assert view.away is None
    assert view.loaded == {name}
    assert view.replicas[A].away == "vLLM gave no reply"

    controls[A].away = False
    await reconcile(fleet)
    assert set(controls[A].adapters) == {name}
    assert fleet.view().replicas[A].away is None


async def test_a_replica_that_restarted_gets_its_adapters_again_alone(
    world: World, fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    world.promote(name)
    await reconcile(fleet)
    controls[B].adapters.clear()

    await reconcile(fleet)

    assert set(controls[B].adapters) == {name}
    assert controls[A].calls == [("load", name)]
    assert controls[B].calls == [("load", name), ("load", name)]


async def test_an_adapter_is_loaded_when_all_that_answer_have_it(
    world: World, fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    world.promote(name)
    controls[B].refuses[name] = "no room"

    await reconcile(fleet)

    assert fleet.view().loaded == frozenset()
    assert fleet.view().refused == {name: "http://b: no room"}


async def test_the_fleet_is_away_when_no_replica_answers(
    fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    for control in controls.values():
        control.away = True

    await reconcile(fleet)

    assert fleet.view().away == "vLLM gave no reply; vLLM gave no reply"


async def test_a_canary_loads_and_probes_every_replica(
    world: World, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    world.others[B].reach[name] = 0.5

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    assert [control.calls for control in controls.values()] == [[("load", name)]] * 2
    evidence = world.evidence(name)
    assert evidence["probe"]["mean_difference"] == 0.25  # the weaker of the two
    assert evidence["replicas"] == {
        "http://vllm": "live: differs from the base by 0.25 nats a token",
        B: "live: differs from the base by 0.5 nats a token",
    }


async def test_a_replica_that_is_down_does_not_hold_up_a_canary(
    world: World, fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    controls[B].away = True

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    assert world.evidence(name)["replicas"][B] == "away: vLLM gave no reply"
    assert controls[B].adapters == {}

    controls[B].away = False
    await reconcile(fleet)
    assert set(controls[B].adapters) == {name}


async def test_a_canary_waits_while_no_replica_answers(
    world: World, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    for control in controls.values():
        control.away = True

    await world.controller().tick()

    assert world.canary(name).phase == "loading"
    assert "waiting for vLLM: vLLM gave no reply" in (world.canary(name).reason or "")


async def test_an_adapter_that_does_nothing_on_one_replica_is_not_held_against_it(
    world: World, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    controls[B].reach[name] = 0.0

    await world.controller().tick()

    assert world.canary(name).phase == "loading"
    assert "waiting for vLLM: http://b: not live: " in (world.canary(name).reason or "")
    assert world.evidence(name)["probe"]["live"] is False


async def test_an_adapter_that_one_replica_refuses_is_not_held_against_it(
    world: World, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    controls[B].refuses[name] = "rank too high"

    await world.controller().tick()

    assert world.canary(name).phase == "loading"
    assert "waiting for vLLM: http://b: rank too high (1 other " in str(world.canary(name).reason)


async def test_a_replica_that_fails_to_load_is_tried_again(
    world: World, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    controls[B].fails_to_load = 2

    await world.controller().tick()
    assert world.canary(name).reason == (
        "waiting for vLLM: http://b: 500 out of memory (1 other replica proved it live: mend that "
        "vLLM, or take it out of serving.upstreams)"
    )
    assert world.evidence(name)["loading"]["failures"] == 1
    for _ in range(2):
        world.clock.now += 4.0  # the second wait; the first one is shorter
        await world.controller().tick()

    assert world.canary(name).phase == "gating"
    assert world.evidence(name)["loading"]["failures"] == 2


async def test_a_replica_that_comes_back_without_effect_is_named_and_gets_no_users(
    world: World, fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    """It was away while the candidate was loaded and probed on the other."""
    name = world.register(1)
    world.promote(name)
    controls[B].away = True
    await reconcile(fleet)
    controls[B].away, controls[B].reach[name] = False, 0.0

    await reconcile(fleet)

    assert controls[B].calls == [("load", name), ("unload", name)]
    assert controls[B].adapters == {}, "the proxy sends users to what vLLM lists"
    view = fleet.view()
    assert view.replicas[A].loaded == {name}
    assert view.replicas[B].loaded == frozenset()
    assert view.refused[name].startswith(
        f"{B}: this vLLM is sick: the adapter has no effect in it (not live: "
    )
    assert world.adapter(name).state == "champion", "the version is proved live elsewhere"

    controls[B].reach.clear()
    world.clock.now += ALTERED_RETRY_S - 1.0
    await reconcile(fleet)
    assert controls[B].adapters == {}
    world.clock.now += 1.0
    await reconcile(fleet)
    assert fleet.view().loaded == {name}
    assert fleet.view().refused == {}


async def test_one_probe_without_effect_unloads_nothing(
    world: World, fleet: Fleet, controls: dict[str, FakeControl]
) -> None:
    name = world.register(1)
    world.promote(name)
    controls[B].reach[name] = 0.0
    probed = controls[B].probe

    async def probe(model_name: str, prompts: Sequence[Sequence[int]] | None = None) -> Probe:
        found = await probed(model_name, prompts)
        if model_name == name:
            controls[B].reach.clear()
        return found

    controls[B].probe = probe  # type: ignore[method-assign]

    await reconcile(fleet)

    assert fleet.view().loaded == {name}
    assert controls[B].calls == [("load", name)]
