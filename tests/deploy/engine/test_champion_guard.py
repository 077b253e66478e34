"""A champion that no vLLM can serve gives way to the one before it, by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.engine.reconcile import MISSING_S, ChampionGuard, EngineView, Fleet, Reconciler
from deploy.registry import flags
from learner.adapter_folder import WEIGHTS
from sidecar.store.models import AuditRow, BannedDigestRow
from support.fake_control import FakeControl

if TYPE_CHECKING:
    from tests.deploy.conftest import World


class Engine:
    """Two replicas and the guard, over one store."""

    def __init__(self, world: World) -> None:
        self.controls = {"http://a": FakeControl(), "http://b": FakeControl()}
        self.reconcilers = {
            url: Reconciler(
                database=world.database,
                control=control,
                model="m",
                max_loras=4,
                replica=url,
                clock=world.clock,
            )
            for url, control in self.controls.items()
        }
        view = Fleet(self.reconcilers).view
        self.guard = ChampionGuard(world.database, "m", view, clock=world.clock)

    async def turn(self) -> bool:
        for one in self.reconcilers.values():
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
