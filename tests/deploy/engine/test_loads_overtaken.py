"""A load that takes long, while somebody decides otherwise or the lease goes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from deploy.engine import reconcile, vllm_control
from deploy.engine.reconcile import LONG_S, UNLOAD_GRACE_S, Desired, Reconciler
from deploy.engine.validation import check_digest
from deploy.engine.vllm_control import Room, in_folder_thread, load_checked
from sidecar.errors import StoreError
from sidecar.store.models import AuditRow
from support.fake_control import FakeControl

if TYPE_CHECKING:
    from tests.deploy.conftest import World


class SlowControl(FakeControl):
    """A vLLM that loads some adapters only when it is let, also after nobody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Event] = {}
        self.begun = asyncio.Event()
        """Set when a load of one of these began."""

    def hold(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    async def load(self, name: str, path: str) -> None:
        gate = self.gates.get(name)
        if gate is None:
            await super().load(name, path)
            return
        self.calls.append(("load", name))
        self.begun.set()
        await gate.wait()
        self.adapters.setdefault(name, path)


class Keeper:
    """A reconciler with what a test moves."""

    def __init__(self, world: World, control: FakeControl) -> None:
        self.changed = asyncio.Event()
        self.holds = True
        self.one = Reconciler(
            database=world.database,
            control=control,
            model="m",
            max_loras=4,
            clock=world.clock,
            acts=lambda: self.holds,
            changed=self.changed,
        )


@pytest.fixture
async def slow() -> SlowControl:
    return SlowControl()


async def test_a_version_that_is_champion_again_is_not_unloaded_by_an_older_plan(
    world: World, slow: SlowControl
) -> None:
    """vLLM is full. `rollback --to v1` loads for seconds; meanwhile `rollback --to v2`, which is
    loaded, and was the oldest that nothing wanted."""
    names = [world.register(version) for version in range(1, 6)]
    for name in names:
        world.promote(name)
    first, second = names[:2]
    slow.adapters = {name: world.adapter(name).path for name in names[1:]}
    keeper = Keeper(world, slow)
    await keeper.one.reconcile()
    slow.calls.clear()
    world.clock.now += UNLOAD_GRACE_S
    world.promote(first)
    gate = slow.hold(first)
    going = asyncio.create_task(keeper.one.reconcile())
    await slow.begun.wait()

    world.promote(second)
    gate.set()
    await going

    assert second in slow.adapters
    assert slow.calls == [("load", first), ("unload", names[2])], "the oldest unwanted one now"


async def test_a_version_that_is_wanted_again_just_before_its_unload_stays(
    world: World, slow: SlowControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback arrives while vLLM tells which adapters answer a request."""
    names = [world.register(version) for version in range(1, 6)]
    for name in names:
        world.promote(name)
        slow.adapters[name] = world.adapter(name).path
    slow.max_loras = 4  # so that it is not asked for that below
    keeper = Keeper(world, slow)
    await keeper.one.reconcile()
    world.clock.now += UNLOAD_GRACE_S

    async def room() -> Room:
        world.promote(names[0])
        return Room(tells=True)

    monkeypatch.setattr(slow, "room", room)
    await keeper.one.reconcile()

    assert slow.calls == []


async def test_a_hanging_load_is_overtaken_by_what_became_more_urgent(
    world: World, slow: SlowControl
) -> None:
    """A vLLM lost its adapters and hangs at the champion. The rollback needs only `previous`."""
    first, second = world.register(1), world.register(2)
    world.promote(first)
    world.promote(second)
    slow.adapters = {name: world.adapter(name).path for name in (first, second)}
    keeper = Keeper(world, slow)
    await keeper.one.reconcile()
    assert keeper.one.view.loaded == {first, second}
    slow.adapters.clear()
    gate = slow.hold(second)
    going = asyncio.create_task(keeper.one.reconcile())
    await slow.begun.wait()
    assert keeper.one.view.loaded == frozenset(), "told before the load ends"
    assert keeper.one.view.loading == second
    assert keeper.one.view.loading_since == world.clock.now

    slow.begun.clear()
    world.promote(first)
    keeper.changed.set()
    await slow.begun.wait()  # it is tried again, after the other

    assert slow.calls == [("load", second), ("load", first), ("load", second)]
    assert keeper.one.view.loaded == {first}
    gate.set()
    await going
    assert keeper.one.view.loaded == {first, second}
    assert keeper.one.view.loading == ""


async def test_a_load_that_is_still_the_most_urgent_goes_on_over_a_change(
    world: World, slow: SlowControl
) -> None:
    first, second = world.register(1), world.register(2)
    world.promote(first)
    gate = slow.hold(first)
    keeper = Keeper(world, slow)
    going = asyncio.create_task(keeper.one.reconcile())
    await slow.begun.wait()
    world.clock.now += LONG_S

    with capture_logs() as logs:
        keeper.changed.set()
        while keeper.changed.is_set():
            await asyncio.sleep(0)
        while first not in keeper.one.view.refused:
            await asyncio.sleep(0.001)
    assert "its load began at 1970-01-01T00:16:40.000Z" in keeper.one.view.refused[first]
    assert keeper.one.view.unproven == {first}, "nobody gives it up for that"
    gate.set()
    await going

    assert keeper.one.view.refused == {}
    assert second not in slow.adapters
    assert slow.calls == [("load", first)]
    assert [(one["event"], one["seconds"]) for one in logs] == [("adapter_loads_long", 10)]


@pytest.mark.parametrize("store", ["up", "away"])
async def test_a_load_ends_with_the_lease(
    world: World, slow: SlowControl, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(1)
    world.promote(name)
    slow.hold(name)
    keeper = Keeper(world, slow)
    going = asyncio.create_task(keeper.one.reconcile())
    await slow.begun.wait()

    keeper.holds = False
    with monkeypatch.context() as patch:
        if store == "away":
            patch.setattr(reconcile, "read_desired", store_away)
        keeper.changed.set()
        while keeper.one.view.loading:
            await asyncio.sleep(0.001)
    await asyncio.gather(going, return_exceptions=True)

    assert slow.calls == [("load", name)]
    assert keeper.one.view.loaded == frozenset()


def store_away(*_: object, **__: object) -> Desired:
    raise StoreError("the store is away")


async def cut_a_load(world: World, slow: SlowControl) -> tuple[Keeper, str]:
    """A load that control has given up, and that vLLM ends a moment later."""
    name = world.register(1)
    world.promote(name)
    slow.hold(name)
    keeper = Keeper(world, slow)
    going = asyncio.create_task(keeper.one.reconcile())
    await slow.begun.wait()
    keeper.holds = False
    keeper.changed.set()
    await going
    slow.adapters[name] = world.adapter(name).path
    keeper.holds = True
    return keeper, name


async def test_an_adapter_whose_load_was_cut_off_is_proved_when_vllm_has_it_all_the_same(
    world: World, slow: SlowControl
) -> None:
    keeper, name = await cut_a_load(world, slow)
    slow.garbles = 3  # vLLM answers the first probe wrongly

    await keeper.one.reconcile()
    assert keeper.one.view.loaded == frozenset()
    assert keeper.one.view.unproven == {name}
    assert "not proved live yet" in keeper.one.view.refused[name]
    await keeper.one.reconcile()

    assert keeper.one.view.loaded == {name}
    assert keeper.one.view.refused == {}
    assert slow.calls == [("load", name)], "it is not loaded twice"


async def test_an_adapter_whose_folder_changed_in_a_load_that_was_cut_off_goes(
    world: World, slow: SlowControl, tmp_path: Path
) -> None:
    keeper, name = await cut_a_load(world, slow)
    folder = Path(world.adapter(name).path)
    folder.rename(tmp_path / "aside")
    (tmp_path / "aside").rename(folder)

    await keeper.one.reconcile()

    assert slow.adapters == {}
    assert "changed while vLLM read it" in keeper.one.view.refused[name]
    assert [row.action for row in world.rows(AuditRow)][-1] == "adapter.altered"


async def test_folders_are_read_in_threads_of_their_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs must not take the threads of the lease and of the rollbacks."""
    name = world.register(1)
    read_in: list[str] = []

    def noted(path: Path, digest: str) -> vllm_control.Marks:
        read_in.append(threading.current_thread().name)
        return check_digest(path, digest)

    monkeypatch.setattr(vllm_control, "check_digest", noted)
    version = world.adapter(name)

    await load_checked(FakeControl(), name, version.path, version.digest)

    assert [one.split("_")[0] for one in read_in] == ["adapter-folder"]


async def test_a_disk_that_hangs_leaves_every_other_thread_free() -> None:
    hang = threading.Event()
    reads = [asyncio.create_task(in_folder_thread(hang.wait)) for _ in range(64)]
    try:
        assert await asyncio.to_thread(lambda: "a beat") == "a beat"
        assert not any(one.done() for one in reads)
    finally:
        hang.set()
    assert await asyncio.gather(*reads) == [True] * 64
