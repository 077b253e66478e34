"""One control acts, the other waits; what is loaded for no reason goes, over restarts too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from deploy.errors import LostLeaseError
from deploy.registry.leases import BEAT_S, HELD_S, LEASE_S, Lease, keep_since, own_id, read_since
from sidecar.errors import StoreError
from sidecar.store.models import LeaseRow
from support.clock import Clock
from tests.deploy.conftest import World


def lease(world: World, holder: str, clock: Clock) -> Lease:
    return Lease(world.database, holder, clock=world.clock, monotonic=clock)


@pytest.mark.both_stores
def test_the_second_waits_and_takes_over_five_seconds_after_the_last_beat(world: World) -> None:
    time = Clock(0.0)
    first, second = lease(world, "a", time), lease(world, "b", time)
    assert (first.beat(), second.beat()) == (True, False)
    time.now = BEAT_S
    assert (first.beat(), second.beat()) == (True, False)  # the last beat of the first, at 1.5 s

    time.now = BEAT_S + HELD_S
    assert first.acts is False  # it stops before the other begins
    assert second.beat() is False
    time.now = BEAT_S + LEASE_S
    assert second.beat() is True
    assert first.beat() is False
    assert "pid" in first.other


def test_their_clocks_are_not_compared(world: World) -> None:
    """The second one's clock is days ahead; it still waits its own five seconds."""
    early, late = Clock(0.0), Clock(1e6)
    first, second = lease(world, "a", early), lease(world, "b", late)
    first.beat()

    assert second.beat() is False
    late.now += LEASE_S - 0.1
    assert second.beat() is False
    late.now += 0.1
    assert second.beat() is True


def test_one_that_is_given_back_or_was_its_own_is_taken_at_once(world: World) -> None:
    time = Clock(0.0)
    first, second = lease(world, "a", time), lease(world, "b", time)
    first.beat()

    killed_and_started_again = lease(world, "a", time)
    assert killed_and_started_again.beat() is True
    killed_and_started_again.give_back()
    assert killed_and_started_again.acts is False
    assert second.beat() is True
    (row,) = world.rows(LeaseRow)
    assert (row.holder, row.beat) == ("b", 3)


def test_of_two_that_take_it_at_once_one_gets_it(world: World) -> None:
    time = Clock(0.0)
    first, second = lease(world, "a", time), lease(world, "b", time)
    seen = first._write(None, True), second._write(None, True)

    assert seen == (True, False)


def test_the_id_stays_with_the_folder(tmp_path: Path) -> None:
    made = own_id(tmp_path)

    assert own_id(tmp_path) == made
    (tmp_path / "control-id").write_bytes(b"\xff")
    assert own_id(tmp_path) not in ("", made)


async def test_two_controls_on_one_store_make_the_comparisons_once(world: World) -> None:
    """A gate of four prompts with two passes is eight judge calls. Without a lease both controls
    make them: sixteen."""
    time = Clock(0.0)
    name = world.register(1)
    world.hold_out(4)
    leases = lease(world, "a", time), lease(world, "b", time)
    turns = [one.only_acting(world.controller().tick) for one in leases]
    for one in leases:
        one.beat()

    for _ in range(4):
        await asyncio.gather(*(turn() for turn in turns))

    assert world.canary(name).phase == "ramping"
    assert len(world.judge.conversations) == 8


async def test_a_control_that_waits_loads_and_unloads_nothing(world: World) -> None:
    name = world.register(1)
    world.promote(name)
    waits = world.keeper(acts=lambda: False)

    await waits.reconcile()

    assert world.control.calls == []
    assert waits.view.away is None


async def test_sixteen_restarts_leave_as_many_adapters_as_fit(world: World) -> None:
    """Each life of control is shorter than the grace of 30 s."""
    for version in range(1, 17):
        world.promote(world.register(version))
        for _ in range(2):
            await world.keeper(replica="http://vllm").reconcile()
            world.clock.now += 20.0

    assert len(world.control.adapters) == 4
    assert world.aliases()["champion"] in world.control.adapters
    assert world.aliases()["previous"] in world.control.adapters


def test_since_when_is_kept_by_replica_and_a_clock_set_back_begins_anew(world: World) -> None:
    keep_since(world.database, "http://a", ["x", "y"], 100.0)
    keep_since(world.database, "http://b", ["x"], 300.0)

    assert keep_since(world.database, "http://a", ["x", "z"], 200.0) == {"x": 100.0, "z": 200.0}
    assert keep_since(world.database, "http://b", ["x"], 250.0) == {"x": 250.0}
    with world.database.read() as session:
        assert read_since(session, "http://a") == {"x": 100.0, "z": 200.0}


@pytest.mark.both_stores
def test_a_deleted_row_is_written_anew_by_its_holder_and_not_by_one_that_waits(
    world: World,
) -> None:
    time = Clock(0.0)
    holds, waits = lease(world, "a", time), lease(world, "b", time)
    holds.beat()
    waits.beat()
    with world.database.write() as session:
        session.execute(text("DELETE FROM lease"))

    assert waits.beat() is False
    assert holds.beat() is True
    (row,) = world.rows(LeaseRow)
    assert (row.holder, row.beat, row.taken_at) == ("a", 1, world.clock.now)
    assert "pid" in row.told


def test_two_with_one_id_do_not_both_act_and_it_is_logged_once(world: World) -> None:
    """Somebody copied a state_dir to a second machine."""
    time = Clock(0.0)
    first, copy = lease(world, "a", time), lease(world, "a", time)
    first.beat()
    assert copy.beat() is True  # as one that was killed and starts again

    with capture_logs() as logs:
        for _ in range(6):
            time.now += BEAT_S
            assert (first.beat(), copy.beat()) == (False, True)

    told = [one for one in logs if one["event"] == "control_id_used_twice"]
    assert len(told) == 1
    assert "control-id" in told[0]["remedy"]
    first.give_back()
    assert copy.beat() is True, "the one that gave way does not give back another's lease"
    time.now += BEAT_S
    first.beat()
    time.now += LEASE_S
    assert first.beat() is True, "the copy is gone"


def test_a_beat_whose_write_failed_after_the_store_kept_it_is_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Clock(0.0)
    holds = lease(world, "a", time)
    holds.beat()
    write = world.database.write

    @contextmanager
    def cut() -> Iterator[Session]:
        with write() as session:
            yield session
        raise StoreError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(world.database, "write", cut)
        with pytest.raises(StoreError):
            holds.beat()

    time.now = BEAT_S
    assert holds.beat() is True


async def test_a_turn_that_finds_its_lease_lost_is_no_failure(world: World) -> None:
    holds = lease(world, "a", Clock(0.0))
    holds.beat()

    async def work() -> None:
        raise LostLeaseError("another control acts")

    with capture_logs() as logs:
        await holds.only_acting(work)()

    assert [one["event"] for one in logs] == ["turn_given_up"]
