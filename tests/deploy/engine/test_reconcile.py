"""Desired against loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from deploy.engine import reconcile, vllm_control
from deploy.engine.reconcile import (
    ALTERED_RETRY_S,
    DRAIN_S,
    LONG_S,
    UNLOAD_GRACE_S,
    Desired,
    Plan,
    make_plan,
    read_desired,
)
from deploy.engine.validation import check_digest
from deploy.engine.vllm_control import Room, in_folder_thread, load_checked
from deploy.registry import versions
from deploy.registry.canary_rule import Move
from learner.adapter_folder import WEIGHTS
from sidecar.errors import StoreError
from sidecar.store.models import AliasRow, AuditRow, CounterRow, TableTakenRow
from support.fake_control import FakeControl
from tests.deploy.conftest import PASSING, World

PATHS = {f"v{number}": f"/{number}" for number in range(1, 7)}


def desired(*wanted: str, rejected: tuple[str, ...] = ()) -> Desired:
    return Desired(wanted=wanted, paths=PATHS, rejected=frozenset(rejected))


def plan(want: Desired, *loaded: str, since: dict[str, float] | None = None) -> Plan:
    return make_plan(want, loaded, max_loras=4, unwanted_since=since or {}, now=1_000.0)


def test_what_is_missing_is_loaded_the_most_urgent_first() -> None:
    assert plan(desired("v3", "v4", "v2"), "v4") == Plan(load=("v3", "v2"), unload=())


def test_old_ones_stay_while_there_is_room() -> None:
    long_ago = {"v1": 0.0}

    assert plan(desired("v3", "v4", "v2"), "v1", "v2", "v3", "v4", since=long_ago).unload == ()


def test_beyond_the_room_the_oldest_goes_after_its_grace() -> None:
    loaded = ("v1", "v2", "v3", "v4", "v5")
    want = desired("v5", "v4")

    assert plan(want, *loaded, since={"v1": 970.0, "v2": 0.0, "v3": 0.0}).unload == ("v1",)
    assert plan(want, *loaded, since={"v1": 970.1, "v2": 970.1, "v3": 970.1}).unload == ()
    assert plan(want, *loaded, since={"v1": 999.0, "v2": 0.0, "v3": 0.0}).unload == ("v2",)


def test_a_wanted_adapter_that_is_not_loaded_yet_takes_room_too() -> None:
    ago = {"v1": 0.0, "v2": 0.0}

    assert plan(desired("v5", "v4", "v3"), "v1", "v2", "v3", "v4", since=ago) == Plan(
        load=("v5",), unload=("v1",)
    )


def test_a_rejected_adapter_goes_at_once() -> None:
    assert plan(desired("v3", rejected=("v4",)), "v3", "v4").unload == ("v4",)


def test_foreign_adapters_are_not_touched() -> None:
    foreign = tuple(f"theirs-{number}" for number in range(9))

    assert plan(desired("v1"), "v1", *foreign) == Plan(load=(), unload=())


def test_champion_candidate_and_previous_are_wanted(world: World) -> None:
    first, second, third = (world.register(version) for version in (1, 2, 3))
    world.promote(first)
    world.promote(second)
    world.ramp(third)

    assert read_desired(world.database, "m").wanted == (second, third, first)


def test_only_versions_that_are_wanted_or_loaded_are_read(world: World) -> None:
    """It is read every two seconds for each replica, and versions are never deleted."""
    first, second, third, fourth = (world.register(version) for version in (1, 2, 3, 4))
    world.promote(second)

    desired = read_desired(world.database, "m", {first, "somebody-elses"})

    assert list(desired.paths) == [first, second]
    assert desired.digests.keys() == {first, second}
    assert desired.paths.keys().isdisjoint({third, fourth})


def test_a_candidate_that_is_not_validated_yet_is_not_loaded(world: World) -> None:
    world.begin(world.register(1))

    assert read_desired(world.database, "m").wanted == ()


async def test_adapters_come_back_after_vllm_restarted(world: World) -> None:
    name = world.register(1)
    world.promote(name)
    keeper = world.keeper()
    await keeper.reconcile()
    assert set(world.control.adapters) == {name}

    world.control.adapters.clear()
    await keeper.reconcile()

    assert world.control.adapters == {name: world.adapter(name).path}
    assert keeper.view.loaded == {name}
    assert world.control.calls == [("load", name), ("load", name)]


async def test_an_adapter_that_vllm_loads_by_its_words_alone_counts_as_refused(
    world: World,
) -> None:
    first, second = world.register(1), world.register(2)
    world.promote(first)
    world.promote(second)
    world.control.unlisted = {second}
    keeper = world.keeper()

    await keeper.reconcile()

    assert keeper.view.loaded == {first}
    assert "does not list it" in keeper.view.refused[second]
    world.control.unlisted = set()
    await keeper.reconcile()
    assert keeper.view.loaded == {first, second}
    assert keeper.view.refused == {}


def flip_a_bit(world: World, name: str) -> Callable[[], None]:
    """Alter the weights on disk. Returns: what restores them."""
    weights = Path(world.adapter(name).path) / WEIGHTS
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    def restore() -> None:
        weights.write_bytes(good)

    return restore


def altered_rows(world: World) -> list[tuple[str, dict[str, Any]]]:
    return [
        (row.subject, row.after) for row in world.rows(AuditRow) if row.action == "adapter.altered"
    ]


def altered_count(world: World) -> int:
    rows = world.rows(CounterRow)
    return sum(row.count for row in rows if (row.stage, row.reason) == ("adapter", "altered"))


async def test_an_adapter_altered_on_disk_is_not_loaded_after_a_restart_of_vllm(
    world: World,
) -> None:
    previous, champion = world.register(1), world.register(2)
    world.promote(previous)
    world.promote(champion)
    keeper = world.keeper()
    await keeper.reconcile()
    world.control.adapters.clear()
    flip_a_bit(world, champion)

    for _ in range(3):
        await keeper.reconcile()

    assert set(world.control.adapters) == {previous}
    assert keeper.view.loaded == {previous}
    assert "the folder was changed" in keeper.view.refused[champion]
    assert altered_rows(world) == [(champion, {"loaded": False, "replica": ""})]
    assert altered_count(world) == 1
    assert world.aliases() == {"champion": champion, "previous": previous}
    for _ in range(2):
        await world.keeper().reconcile()  # control was started again
    assert altered_count(world) == len(altered_rows(world)) == 1, "told once"


async def test_an_alteration_that_two_replicas_find_is_told_once(world: World) -> None:
    name = world.register(1)
    world.promote(name)
    keepers = [world.keeper(replica=one) for one in ("http://a", "http://b")]
    restore = flip_a_bit(world, name)

    for keeper in keepers:
        await keeper.reconcile()
    told = world.actions()
    restore()
    world.clock.now += ALTERED_RETRY_S
    for keeper in keepers:
        await keeper.reconcile()

    assert told.count("adapter.altered") == altered_count(world) == 1
    assert altered_rows(world)[0][1]["replica"] == "http://a"
    assert world.actions()[-2:] == ["adapter.altered", "adapter.sound"]


async def test_a_restored_folder_is_loaded_at_the_next_poll(world: World) -> None:
    name = world.register(1)
    world.promote(name)
    restore = flip_a_bit(world, name)
    keeper = world.keeper()
    await keeper.reconcile()
    restore()

    world.clock.now += ALTERED_RETRY_S - 1.0
    await keeper.reconcile()
    assert world.control.calls == []
    world.clock.now += 1.0
    await keeper.reconcile()

    assert set(world.control.adapters) == {name}
    assert keeper.view.refused == {}
    assert world.actions()[-2:] == ["adapter.altered", "adapter.sound"]
    world.control.adapters.clear()
    flip_a_bit(world, name)
    await world.keeper().reconcile()
    assert altered_count(world) == 2, "another alteration is told, also by another control"


async def test_a_clock_that_is_set_back_delays_no_restored_folder(world: World) -> None:
    name = world.register(1)
    world.promote(name)
    restore = flip_a_bit(world, name)
    keeper = world.keeper()
    await keeper.reconcile()
    restore()
    world.clock.now -= 86_400.0

    await keeper.reconcile()

    assert set(world.control.adapters) == {name}


@pytest.mark.parametrize(
    ("moves", "state"), [(PASSING[:1], "rejected"), (PASSING[:2], "rolled_back")]
)
async def test_the_canary_of_an_altered_candidate_ends_also_while_it_is_paused(
    world: World, moves: tuple[Move, ...], state: str
) -> None:
    name = world.register(1)
    world.begin(name, moves)
    world.act("pause", name)
    flip_a_bit(world, name)

    await world.keeper().reconcile()

    assert world.control.calls == []
    assert world.canary(name).phase == "rolled_back"
    assert world.adapter(name).state == state
    assert world.table().canary is None


@pytest.mark.parametrize("what", [WEIGHTS, ""])
async def test_a_link_in_the_place_of_a_folder_or_a_file_is_not_loaded(
    world: World, tmp_path: Path, what: str
) -> None:
    name = world.register(1)
    world.promote(name)
    place = Path(world.adapter(name).path) / what
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    keeper = world.keeper()

    await keeper.reconcile()

    assert world.control.calls == []
    assert "is a symbolic link" in keeper.view.refused[name]
    assert altered_count(world) == 1


async def test_a_folder_swapped_while_vllm_reads_it_does_not_stay_loaded(
    world: World, tmp_path: Path
) -> None:
    name = world.register(1)
    world.promote(name)
    folder = Path(world.adapter(name).path)

    def swap_and_swap_back(_: str) -> None:
        folder.rename(tmp_path / "aside")
        (tmp_path / "aside").rename(folder)

    world.control.on_load = swap_and_swap_back
    world.control.fails_to_unload = 1
    keeper = world.keeper()

    await keeper.reconcile()
    assert set(world.control.adapters) == {name}, "vLLM failed to unload it"
    await keeper.reconcile()
    assert set(world.control.adapters) == set()

    world.control.on_load = lambda _: None
    world.clock.now += ALTERED_RETRY_S
    await keeper.reconcile()
    assert set(world.control.adapters) == {name}


async def test_a_champion_that_nobody_registered_keeps_no_other_out(world: World) -> None:
    name = world.register(1)
    world.promote(name)
    with world.database.write() as session:
        session.get_one(AliasRow, ("m", "previous")).adapter = "ghost"
    keeper = world.keeper()

    await keeper.reconcile()

    assert set(world.control.adapters) == {name}
    assert keeper.view.refused["ghost"].startswith("ghost is no registered adapter of m, and a row")


async def test_an_error_nobody_expected_of_one_adapter_keeps_no_other_out(world: World) -> None:
    first, second = world.register(1), world.register(2)
    world.promote(first)
    world.promote(second)

    def fail(name: str) -> None:
        if name == second:
            raise RecursionError("deep")

    world.control.on_load = fail
    keeper = world.keeper()

    await keeper.reconcile()

    assert set(world.control.adapters) == {first}
    assert keeper.view.refused == {second: "RecursionError: deep"}


async def test_an_adapter_is_unloaded_only_after_its_last_request(world: World) -> None:
    names = world.serve_five()
    first, second = names[:2]
    world.control.busy = {first}
    keeper = world.keeper()
    await keeper.reconcile()
    world.clock.now += UNLOAD_GRACE_S
    await keeper.reconcile()
    assert world.control.calls == [], "one is too many, and the oldest answers a user"

    world.control.busy = {second}
    await keeper.reconcile()

    assert world.control.calls == [("unload", first)]


async def test_a_vllm_that_hides_its_metrics_may_answer_with_any_adapter_that_had_users(
    world: World,
) -> None:
    names = [world.register(version) for version in range(1, 7)]
    for name in names[:-1]:
        world.promote(name)
    for name in names:
        world.control.adapters[name] = world.adapter(name).path
    with world.database.write() as session:
        versions.set_state(session, names[-1], "rejected")
    world.control.hides_metrics = True
    keeper = world.keeper()
    for wait_s in (0.0, UNLOAD_GRACE_S, DRAIN_S - 1.0):
        world.clock.now += wait_s
        await keeper.reconcile()
    assert world.control.calls == [("unload", names[-1])], "it never had a user"

    world.clock.now += 1.0
    await keeper.reconcile()

    assert world.control.calls[1:] == [("unload", names[0])]


def took(world: World, proxy: str, generation: int) -> None:
    with world.database.write() as session:
        session.merge(TableTakenRow(proxy=proxy, model="m", generation=generation, taken_at=1.0))


@pytest.mark.both_stores
async def test_an_adapter_stays_for_a_proxy_that_has_not_taken_the_present_table(
    world: World,
) -> None:
    """One of two proxies is cut off from the store: its sessions go on with the old table."""
    names = world.serve_five()
    generation = world.table().generation
    took(world, "one", generation)
    took(world, "two", generation - 4)
    keeper = world.keeper()
    for wait_s in (0.0, UNLOAD_GRACE_S, DRAIN_S - UNLOAD_GRACE_S - 1.0):
        world.clock.now += wait_s
        await keeper.reconcile()
    assert world.control.calls == []

    took(world, "two", generation)
    await keeper.reconcile()

    assert world.control.calls == [("unload", names[0])]


@pytest.mark.parametrize("why", ["the proxy is gone", "the adapter was rolled back"])
async def test_a_proxy_that_is_behind_keeps_no_adapter_for_ever_nor_a_bad_one(
    world: World, why: str
) -> None:
    names = world.serve_five()
    took(world, "gone", 1)
    if "rolled back" in why:
        with world.database.write() as session:
            versions.set_state(session, names[0], "rolled_back")
    keeper = world.keeper()
    await keeper.reconcile()

    world.clock.now += UNLOAD_GRACE_S if "rolled back" in why else DRAIN_S
    await keeper.reconcile()

    assert world.control.calls == [("unload", names[0])]


async def test_a_request_that_never_ends_keeps_no_place_for_ever(world: World) -> None:
    names = world.serve_five()
    world.control.busy = {names[0]}
    keeper = world.keeper()
    for wait_s in (0.0, UNLOAD_GRACE_S, DRAIN_S - 1.0):
        world.clock.now += wait_s
        await keeper.reconcile()
    assert world.control.calls == []

    world.clock.now += 1.0
    await keeper.reconcile()

    assert world.control.calls == [("unload", names[0])]


async def test_a_vllm_with_too_little_room_is_told_with_the_flag_once_after_each_start(
    world: World,
) -> None:
    keeper = world.keeper()
    with capture_logs() as logs:
        await keeper.reconcile()
        assert [one for one in logs if one["event"] == "max_loras_too_small"] == []
        world.control.max_loras = 3
        for away in (False, False, True, False):
            world.control.away = away
            await keeper.reconcile()
    told = [one for one in logs if one["event"] == "max_loras_too_small"]

    assert [(one["vllm"], one["setting"]) for one in told] == [(3, 4), (3, 4)]
    assert "--max-loras 4" in told[0]["remedy"]


# A load that takes long, while somebody decides otherwise or the lease goes.


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
        self.one = world.keeper(control, acts=lambda: self.holds, changed=self.changed)


@pytest.fixture
async def slow() -> SlowControl:
    return SlowControl()


async def test_a_version_that_is_champion_again_is_not_unloaded_by_an_older_plan(
    world: World, slow: SlowControl
) -> None:
    """vLLM is full. `rollback --to v1` loads for seconds; meanwhile `rollback --to v2`, which is
    loaded, and was the oldest that nothing wanted."""
    names = world.serve_five()
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
    names = world.serve_five()
    slow.adapters = dict(world.control.adapters)
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
