"""The schedule over the store, with children that are only pretended; and one real child."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from learner.command import NO_ROOM_FLAG, STOPPED
from learner.progress.watch import Missing, write_missing
from learner.resume import CLAIMED, WorkFolder
from learner.runs.runs import open_run
from learner.schedule import loop as schedule_module
from learner.schedule.loop import (
    DUE_FLAG,
    PAUSED_FLAG,
    REQUESTED_FLAG,
    TRIES,
    InTurn,
    Schedule,
    Worker,
)
from sidecar.conditions import read, read_all
from sidecar.settings import Settings
from sidecar.store.database import Database, count, set_flag
from sidecar.store.models import AdapterRow, CanaryRow, RunRow
from support.clock import Clock
from tests.learner.conftest import PutGroup, PutVersion, make_scored_group


class FakeChild:
    """A run that ends when the test says so."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.code = -15


class World:
    """A schedule and the children it launched."""

    def __init__(self, settings: Settings, database: Database, clock: Clock) -> None:
        self.children: list[FakeChild] = []
        self.database = database
        self.clock = clock
        self.schedule = Schedule(settings, database, self._launch, clock=clock)

    def _launch(self, run_id: str) -> FakeChild:
        self.children.append(FakeChild(run_id))
        return self.children[-1]

    def poll(self) -> str:
        decision = self.schedule.poll()
        assert decision is not None
        return decision.kind

    def turn(self) -> None:
        """A scheduled time comes round."""
        self.flag(DUE_FLAG, "1")

    def flag(self, name: str, value: str) -> None:
        with self.database.write() as session:
            set_flag(session, name, value, now=self.clock.now)


MakeWorld = Callable[..., World]


@pytest.fixture
def world(settings: Settings, database: Database, clock: Clock) -> MakeWorld:
    """world(**learner settings). By themselves no scheduled times come while a test lasts."""

    def make(**changes: Any) -> World:
        seldom = {"interval_s": 1e8, "cron": "0 0 1 1 *"}
        learner = settings.learner.model_copy(update={**seldom, **changes})
        return World(settings.model_copy(update={"learner": learner}), database, clock)

    return make


def test_groups_start_a_run_as_soon_as_enough_wait(world: MakeWorld, put_group: PutGroup) -> None:
    here = world()
    put_group(make_scored_group([0.0, 1.0], group_id="a"))
    assert here.poll() == "too_few_groups"

    put_group(make_scored_group([0.0, 1.0], group_id="b"))

    assert here.poll() == "start"
    assert here.poll() == "running"
    assert len(here.children) == 1


@pytest.mark.usefixtures("two_groups")
def test_an_interval_has_one_run_a_turn(world: MakeWorld) -> None:
    here = world(schedule="interval")
    assert here.poll() == "not_due"

    here.turn()
    assert here.poll() == "start"
    here.children[0].code = 0

    assert here.poll() == "not_due"
    here.turn()
    assert here.poll() == "start"


def test_a_turn_with_too_few_groups_is_skipped(world: MakeWorld) -> None:
    here = world(schedule="cron")
    here.turn()

    assert here.poll() == "too_few_groups"
    assert here.poll() == "not_due"


@pytest.mark.usefixtures("two_groups")
def test_a_turn_that_waits_for_a_canary_is_kept_over_a_restart(
    world: MakeWorld, database: Database, put_version: PutVersion
) -> None:
    name = put_version(1, state="registered")
    before = world(schedule="cron")
    before.turn()
    assert before.poll() == "canary"

    after = world(schedule="cron")
    assert after.poll() == "canary"
    with database.write() as session:
        session.get_one(AdapterRow, name).state = "retired"

    assert after.poll() == "start"
    after.children[0].code = 0
    assert after.poll() == "not_due"
    assert world(schedule="cron").poll() == "not_due"


@pytest.mark.usefixtures("two_groups")
def test_a_run_waits_until_users_are_few(
    world: MakeWorld, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 requests in the first half of a minute, 3 in the second, none in the third."""
    monkeypatch.setattr(schedule_module, "IDLE_WINDOW_S", 60.0)
    here = world(idle_below=5.0)
    told = []
    for requests in (0, 12, 3, 0):
        with database.write() as session:
            count(session, "requests", "ok", requests)
        told.append(here.poll())
        clock.now += 30.0

    assert told == ["users_busy", "users_busy", "users_busy", "start"]


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("schedule", ["groups", "cron", "interval"])
def test_a_run_without_room_waits_ten_minutes_and_says_why(
    world: MakeWorld, database: Database, clock: Clock, schedule: str
) -> None:
    here = world(schedule=schedule)
    here.turn()
    assert here.poll() == "start"
    assert here.poll() == "running"
    here.flag(NO_ROOM_FLAG, "a run needs about 16.4 GB on cuda:0")
    here.children[-1].code = 5
    again_at = clock.now + 600.0

    decision = here.schedule.poll()

    assert decision is not None
    assert (decision.kind, decision.why) == ("no_room", "a run needs about 16.4 GB on cuda:0")
    with database.read() as session:
        told = read(session, "schedule", "m")
    assert told is not None
    assert (told.code, told.message, told.until) == (decision.kind, decision.why, again_at)
    clock.now += 599.0
    assert here.poll() == "no_room"
    assert world(schedule=schedule).poll() == "start", "a restart keeps the turn"
    here.flag(DUE_FLAG, "1")
    clock.now += 1.0
    assert here.poll() == "start"


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("schedule", ["cron", "interval"])
def test_a_turn_whose_run_fails_is_tried_again_until_it_has_failed_too_often(
    world: MakeWorld, clock: Clock, schedule: str
) -> None:
    here = world(schedule=schedule)
    here.turn()
    for failures in range(1, TRIES + 1):
        assert here.poll() == "start"
        here.children[-1].code = 1
        decision = here.schedule.poll()
        assert decision is not None
        if failures < TRIES:
            assert (decision.kind, decision.again_at) == (
                "held_back",
                clock.now + 30 * 2 ** (failures - 1),
            )
            assert "the last run failed (exit code 1)" in decision.why
            clock.now = decision.again_at or 0.0
    assert decision is not None
    assert decision.kind == "not_due"
    assert "the last run failed (exit code 1), 8 in a row" in decision.why

    clock.now += 86_400.0
    assert here.poll() == "not_due"
    here.turn()
    assert here.poll() == "start"
    here.children[-1].code = 1
    assert here.poll() == "not_due"
    clock.now += 86_400.0
    here.turn()
    assert here.poll() == "start"
    here.children[-1].code = 0
    assert here.poll() == "not_due"


@pytest.mark.usefixtures("two_groups")
def test_a_run_that_trains_ends_what_was_found_lacking(
    world: MakeWorld, database: Database, clock: Clock
) -> None:
    lack = Missing("learner.device", "it cannot be used")
    with database.write() as session:
        write_missing(session, [lack], now=clock.now)
    here = world()
    found = []
    for code in (5, 0):
        clock.now += 600.0
        assert here.poll() == "start"
        here.children[-1].code = code
        here.poll()
        with database.read() as session:
            found.append([one.message for one in read_all(session) if one.kind != "schedule"])

    said = "the learner found at its start: learner.device: it cannot be used"
    assert found == [[said], []]


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("flag", [DUE_FLAG, REQUESTED_FLAG])
def test_a_run_that_was_stopped_before_it_claimed_groups_starts_again(
    world: MakeWorld, flag: str
) -> None:
    here = world(schedule="cron")
    here.flag(flag, "1")
    assert here.poll() == "start"
    here.children[0].code = STOPPED
    assert here.poll() == "start"

    here.schedule.stop()

    assert world(schedule="cron").poll() == "start", "after a restart"


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize(("schedule", "code"), [("cron", 5), ("cron", 1), ("manual", 5)])
def test_a_run_that_was_only_asked_for_is_not_tried_again(
    world: MakeWorld, clock: Clock, schedule: str, code: int
) -> None:
    here = world(schedule=schedule)
    here.flag(REQUESTED_FLAG, "1")
    assert here.poll() == "start"
    here.flag(NO_ROOM_FLAG, "a run needs about 16.4 GB on cuda:0")
    here.children[-1].code = code
    clock.now += 3600.0

    decision = here.schedule.poll()

    assert decision is not None
    assert not decision.start
    words = "the last run failed" if code == 1 else "`sidecar learner run` asks for another"
    assert words in decision.why
    clock.now += 3600.0
    assert here.poll() == decision.kind


def test_the_decision_is_told_when_it_changes_and_each_minute(
    world: MakeWorld, database: Database, clock: Clock
) -> None:
    def told() -> tuple[str, str, float] | None:
        with database.read() as session:
            one = read(session, "schedule", "m")
        return None if one is None else (one.code, one.message, one.at)

    here = world(schedule="manual")
    assert told() is None

    here.poll()
    first = ("not_due", "the schedule has not come round", clock.now)
    assert told() == first
    clock.now += 59.0
    here.poll()
    assert told() == first
    clock.now += 1.0
    here.poll()
    assert told() == (*first[:2], clock.now)
    here.flag(PAUSED_FLAG, "1")
    here.poll()
    assert told() == ("paused", "paused by the operator", clock.now)


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("state", ["loading", "gating", "ramping"])
def test_an_open_canary_is_waited_for(
    world: MakeWorld, database: Database, put_version: PutVersion, state: str
) -> None:
    name = put_version(1, state=state)
    with database.write() as session:
        session.add(
            CanaryRow(
                canary_id="c",
                model="m",
                candidate=name,
                champion="base",
                state=state,
                salt="",
                created_at=1.0,
                step_started_at=1.0,
                evidence={},
            )
        )
    here = world()
    with capture_logs() as logs:
        assert here.poll() == "canary"
        assert here.poll() == "canary"
    waits = [entry["why"] for entry in logs if entry["event"] == "learn_waits"]
    assert waits == [f"the canary of {name} is not decided"]

    with database.write() as session:
        session.get_one(CanaryRow, "c").state = "rolled_back"

    assert here.poll() == "start"


@pytest.mark.usefixtures("two_groups")
def test_a_version_that_waits_for_its_canary_is_waited_for(
    world: MakeWorld, put_version: PutVersion
) -> None:
    put_version(1, state="registered")

    assert world().poll() == "canary"


@pytest.mark.usefixtures("two_groups")
def test_a_clock_that_is_set_back_lengthens_no_hold(world: MakeWorld, clock: Clock) -> None:
    here = world()
    assert here.poll() == "start"
    here.children[-1].code = 1
    assert here.poll() == "held_back"

    clock.now -= 86_400.0

    assert here.poll() == "held_back"
    clock.now += 29.9
    assert here.poll() == "held_back"
    clock.now += 0.1
    assert here.poll() == "start"


@pytest.mark.usefixtures("two_groups")
def test_a_killed_child_gives_up_its_lease_at_once(
    world: MakeWorld, database: Database, clock: Clock
) -> None:
    here = world()
    here.poll()
    run_id = here.children[0].run_id
    with database.write() as session:
        open_run(session, run_id=run_id, model="m", parent="base", settings={}, now=clock.now)

    here.children[0].code = -9
    here.poll()

    with database.read() as session:
        row = session.get_one(RunRow, run_id)
        assert (row.status, row.reason) == ("failed", "its process ended with -9")


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("schedule", ["groups", "cron"])
def test_a_killed_run_that_goes_on_says_so_at_once(
    world: MakeWorld, database: Database, clock: Clock, tmp_path: Path, schedule: str
) -> None:
    here = world(schedule=schedule, adapters_dir=tmp_path)
    here.turn()
    here.poll()
    run_id = here.children[0].run_id
    work = WorkFolder(tmp_path, run_id)
    work.make()
    work.write(CLAIMED, {})
    with database.write() as session:
        open_run(session, run_id=run_id, model="m", parent="base", settings={}, now=clock.now)
        row = session.get_one(RunRow, run_id)
        row.holder = {"token": "t", "released": "broken"}  # as a process that is known to be gone
    here.children[0].code = -9

    decision = here.schedule.poll()

    assert decision is not None
    assert decision.why == f"the last run was killed (SIGKILL); run {run_id} goes on"
    assert decision.again_at == clock.now + 30.0
    with database.read() as session:
        row = session.get_one(RunRow, run_id)
        said = "its process was killed (SIGKILL); the next start goes on with it"
        assert (row.status, row.reason) == ("running", said)


@pytest.mark.usefixtures("two_groups")
def test_stopping_ends_the_child(world: MakeWorld) -> None:
    here = world()
    here.poll()

    here.schedule.stop()

    assert here.children[0].code == -15


def test_a_store_that_is_away_is_waited_for(world: MakeWorld, database: Database) -> None:
    here = world()
    database.close()
    path = Path(database.url.removeprefix("sqlite:///"))
    path.unlink()
    path.mkdir()

    with capture_logs() as logs:
        assert here.schedule.poll() is None

    assert [entry["kind"] for entry in logs] == ["store"]


def test_a_process_that_cannot_be_started_or_asked_loses_no_request(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(schedule="manual")
    here.flag(REQUESTED_FLAG, "1")

    def full(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr(here.schedule, "_launch", full)
            assert here.schedule.poll() is None
        assert here.poll() == "start"
        with monkeypatch.context() as patch:
            patch.setattr(here.children[0], "exit_code", full)
            InTurn([here.schedule]).poll()

    assert [entry["kind"] for entry in logs if "kind" in entry] == ["process"] * 3
    assert here.poll() == "running"


def test_a_child_is_asked_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child that ignores TERM; the shim stands where Python would start the learner."""
    shim = tmp_path / "python"
    loop = f"while :; do read x < {tmp_path}/fifo; done"
    shim.write_text(f"#!/bin/sh\ntrap '' TERM\n: > {tmp_path}/ready\n{loop}\n")
    shim.chmod(0o755)
    for name in ("ready", "fifo"):
        os.mkfifo(tmp_path / name)
    monkeypatch.setattr(sys, "executable", str(shim))
    monkeypatch.setattr(schedule_module, "STOP_TIMEOUT_S", 0.1)
    child = Worker(None).launch("r")
    (tmp_path / "ready").read_text()  # it waits until the shim has written
    assert child.exit_code() is None

    child.stop()

    assert child.exit_code() == -9
