"""A champion that no vLLM can serve gives way to the one before it, by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deploy.engine.reconcile import ALTERED_RETRY_S, MISSING_S, ChampionGuard, EngineView, Fleet
from deploy.engine.vllm_control import Probe
from deploy.registry import flags
from learner.adapter_folder import WEIGHTS
from sidecar.store.models import AuditRow, BannedDigestRow
from support.fake_control import FakeControl
from tests.deploy.conftest import World


class Engine:
    """Two replicas and the guard, over one store."""

    def __init__(self, world: World) -> None:
        self.controls = {"http://a": FakeControl(), "http://b": FakeControl()}
        self.fleet = world.fleet(self.controls)
        self.guard = ChampionGuard(world.database, "m", self.fleet.view, clock=world.clock)

    async def turn(self) -> bool:
        for one in self.fleet.reconcilers.values():
            await one.reconcile()
        return await self.guard.check()


@pytest.fixture
def served(world: World) -> tuple[str, str]:
    names = world.register(1), world.register(2, values=(0.3, 0.1))
    for name in names:
        world.promote(name)
    return names


async def test_a_champion_refused_by_all_gives_way_after_half_a_minute(
    world: World, served: tuple[str, str]
) -> None:
    first, second = served
    engine = Engine(world)
    for control in engine.controls.values():
        control.refuses[second] = "corrupt"

    assert await engine.turn() is False
    world.clock.now += MISSING_S - 0.1
    assert await engine.turn() is False
    world.clock.now += 0.1
    assert await engine.turn() is True

    assert world.table().champion == first
    told = [row for row in world.rows(AuditRow) if row.action == "rollback"]
    assert (told[0].actor, told[0].reason.startswith(f"no vLLM can serve {second}")) == (
        "control",
        True,
    )
    assert world.rows(BannedDigestRow) == []
    with world.database.read() as session:
        assert flags.read(session, "m").paused is True


async def test_controls_that_are_started_again_and_again_count_on(
    world: World, served: tuple[str, str]
) -> None:
    first, second = served

    async def life() -> bool:
        engine = Engine(world)
        for control in engine.controls.values():
            control.refuses[second] = "corrupt"
        return await engine.turn()

    acted = []
    for _ in range(5):
        acted.append(await life())
        world.clock.now += 0.3 * MISSING_S

    assert acted == [False, False, False, False, True]
    assert world.table().champion == first


async def test_what_was_served_again_meanwhile_counts_anew(
    world: World, served: tuple[str, str]
) -> None:
    engine = Engine(world)
    for refuses in (True, False, True):
        for control in engine.controls.values():
            control.refuses = {served[1]: "corrupt"} if refuses else {}
            control.adapters.pop(served[1], None)
        assert await engine.turn() is False
        world.clock.now += 0.9 * MISSING_S
    assert await engine.turn() is False


async def test_a_clock_that_is_set_back_counts_anew(world: World, served: tuple[str, str]) -> None:
    engine = Engine(world)
    for control in engine.controls.values():
        control.refuses[served[1]] = "corrupt"
    await engine.turn()
    world.clock.now -= 86_400.0

    assert await engine.turn() is False
    world.clock.now += MISSING_S
    assert await engine.turn() is True


async def test_an_altered_champion_gives_way_too(world: World, served: tuple[str, str]) -> None:
    first, second = served
    with open(f"{world.adapter(second).path}/{WEIGHTS}", "ab") as weights:
        weights.write(b"x")
    engine = Engine(world)

    await engine.turn()
    world.clock.now += MISSING_S
    rolled_back = await engine.turn()

    assert (rolled_back, world.table().champion) == (True, first)


@pytest.mark.parametrize("kind", ["one has it", "all are away", "nothing before it"])
async def test_it_stays_where_a_rollback_would_not_help(
    world: World, served: tuple[str, str], kind: str
) -> None:
    engine = Engine(world)
    a, b = engine.controls.values()
    a.refuses[served[1]] = "corrupt"
    if kind != "one has it":
        b.refuses[served[1]] = "corrupt"
    if kind == "nothing before it":
        a.refuses[served[0]] = b.refuses[served[0]] = "corrupt"
    if kind == "all are away":
        a.away = b.away = True

    await engine.turn()
    world.clock.now += 10 * MISSING_S
    assert await engine.turn() is False
    assert world.table().champion == served[1]


async def test_a_champion_that_vllm_has_and_that_is_not_proved_yet_is_not_given_up(
    world: World, served: tuple[str, str]
) -> None:
    """vLLM is too busy to answer the probe; it answers the champion's users all the same."""
    first, second = served
    has_it = EngineView(
        away=None,
        loaded=frozenset({first}),
        unproven=frozenset({second}),
        refused={second: "it is loaded, and not proved live yet: vLLM gave no reply"},
    )
    engine = EngineView(away=None, refused=has_it.refused, replicas={"http://a": has_it})
    guard = ChampionGuard(world.database, "m", lambda: engine, clock=world.clock)

    for _ in range(2):
        assert await guard.check() is False
        world.clock.now += MISSING_S
    assert world.table().champion == second


# Several replicas: each is kept on its own, and a canary needs those that answer.


A, B = "http://a", "http://b"


@pytest.fixture
def controls(world: World) -> dict[str, FakeControl]:
    """Two fakes of vLLM; the world's own is the first."""
    world.others = {B: FakeControl()}
    return {A: world.control, B: world.others[B]}


@pytest.fixture
def fleet(world: World, controls: dict[str, FakeControl]) -> Fleet:
    return world.fleet(controls)


async def reconcile(fleet: Fleet) -> None:
    for one in fleet.reconcilers.values():
        await one.reconcile()


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
