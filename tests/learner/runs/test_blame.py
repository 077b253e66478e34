"""Failed and killed runs count against the groups that may be the cause, and against no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from ingest.intake.choose import count_pending
from learner.errors import DeviceError, NothingToLearnError, OutOfMemoryError, ParentError
from learner.records import TrainingJob
from learner.runs.runs import LEASE_S, open_run, report_place
from learner.runs.source import FAILED_RUNS, claim
from learner.runs.train import Run
from learner.schedule.loop import Schedule
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import CounterRow, GroupRow, RunRow
from support.clock import Clock
from tests.learner.conftest import FakeTrainer, NewRun, PutGroup, make_scored_group

BAD = "15"
KilledRun = Callable[[str, str | None], None]


@pytest.fixture
def sixteen(put_group: PutGroup) -> None:
    for number in range(16):
        put_group(make_scored_group([0.0, 1.0], group_id=str(number)))


@pytest.fixture
def new_run(new_run: NewRun, clock: Clock) -> NewRun:
    """new_run(run_id, trainer): when the lease of the one before is over."""

    def make(run_id: str = "r1", trainer: Any = None, **changes: Any) -> Run:
        clock.now += LEASE_S + 1
        return new_run(run_id, trainer, **{"min_groups": 16, **changes})

    return make


@pytest.fixture
def killed_run(database: Database, clock: Clock) -> KilledRun:
    """killed_run(run_id, place): a run that took all groups, and died there."""

    def start(run_id: str, place: str | None) -> None:
        clock.now += LEASE_S + 1
        with database.write() as session:
            open_run(session, run_id=run_id, model="m", parent="base", settings={}, now=clock.now)
            claim(session, run_id, session.scalars(select(GroupRow.group_id)).all())
        report_place(database, run_id, place)

    return start


def rows(database: Database) -> dict[str, GroupRow]:
    with database.read() as session:
        return {row.group_id: row for row in session.scalars(select(GroupRow))}


def attempts(database: Database) -> dict[str, int]:
    return {name: row.learn_attempts for name, row in rows(database).items() if row.learn_attempts}


@pytest.mark.usefixtures("sixteen")
def test_a_group_that_kills_its_run_is_found_and_the_others_train(
    killed_run: KilledRun,
    new_run: NewRun,
    database: Database,
    fake_trainer: FakeTrainer,
    put_group: PutGroup,
) -> None:
    killed_run("r1", BAD)

    new_run("r2", fake_trainer).start()  # it finds the dead run, and leaves the suspect out

    assert attempts(database) == {BAD: 1}
    assert "was computing it when" in (rows(database)[BAD].detail or "")
    after = {name: row.status for name, row in rows(database).items()}
    assert after.pop(BAD) == "scored"
    assert set(after.values()) == {"trained"}

    for number in range(16, 31):
        put_group(make_scored_group([0.0, 1.0], group_id=str(number)))
    killed_run("r3", BAD)
    fake_trainer.weights = b"others"
    with pytest.raises(NothingToLearnError):  # 15 wait now: the one that killed twice is out
        new_run("r4", fake_trainer).start()

    assert (rows(database)[BAD].status, rows(database)[BAD].reason) == ("dropped", FAILED_RUNS)
    with database.read() as session:
        assert session.get_one(CounterRow, ("learn", FAILED_RUNS)).count == 1


@pytest.mark.usefixtures("sixteen")
def test_a_run_that_dies_while_it_loads_the_base_counts_against_no_group(
    killed_run: KilledRun,
    new_run: NewRun,
    database: Database,
    fake_trainer: FakeTrainer,
) -> None:
    killed_run("r1", "")

    new_run("r2", fake_trainer).start()

    assert {row.status for row in rows(database).values()} == {"trained"}
    assert attempts(database) == {}


@pytest.mark.usefixtures("sixteen")
def test_a_killed_run_of_a_trainer_that_names_no_group_counts_against_all_of_them(
    killed_run: KilledRun,
    new_run: NewRun,
    database: Database,
    fake_trainer: FakeTrainer,
) -> None:
    killed_run("r1", None)

    new_run("r2", fake_trainer).start()

    assert len(fake_trainer.jobs[0].groups) == 8
    assert sorted(row.status for row in rows(database).values()) == ["scored"] * 8 + ["trained"] * 8
    assert set(attempts(database).values()) == {1}


@pytest.mark.usefixtures("sixteen")
def test_an_error_that_names_no_group_is_narrowed_down_to_the_one(
    new_run: NewRun, database: Database, fake_trainer: FakeTrainer, put_group: PutGroup
) -> None:
    """New groups come in, as long as learning goes on; the bad one is found by halves."""

    def fail_with_the_bad_one(job: TrainingJob) -> None:
        fake_trainer.weights = repr(sorted(g.group_id for g in job.groups)).encode()
        if BAD in {group.group_id for group in job.groups}:
            raise ZeroDivisionError("somewhere")

    fake_trainer.on_train = fail_with_the_bad_one
    failures, coming = 0, 16
    for number in range(40):
        if rows(database)[BAD].status == "dropped":
            break
        with database.read() as session:
            pending = count_pending(session, {"base"})
        for _ in range(16 - pending):  # new exchanges are chosen while fewer wait than may
            put_group(make_scored_group([0.0, 1.0], group_id=str(coming)))
            coming += 1
        try:
            new_run(f"r{number}", fake_trainer).start()
        except ZeroDivisionError:
            failures += 1

    assert (rows(database)[BAD].status, rows(database)[BAD].reason) == ("dropped", FAILED_RUNS)
    assert "somewhere" in (rows(database)[BAD].detail or "")
    assert failures <= 7
    dropped = [name for name, row in rows(database).items() if row.status == "dropped"]
    assert dropped == [BAD]
    assert sum(row.status == "trained" for row in rows(database).values()) >= 16


ENVIRONMENT = [
    OutOfMemoryError("16 of 16"),
    MemoryError(),
    ParentError("base cannot be loaded"),
    DeviceError("no cuda"),
    StoreError("database is locked"),
    OSError(28, "No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize("error", ENVIRONMENT)
def test_what_the_environment_does_counts_against_no_group(
    new_run: NewRun, database: Database, fake_trainer: FakeTrainer, error: BaseException
) -> None:
    fake_trainer.error = error

    with pytest.raises(type(error)):
        new_run("r1", fake_trainer).start()

    assert attempts(database) == {}
    assert {row.status for row in rows(database).values()} == {"scored"}


class Child:
    """A run of its own process, as the schedule sees it."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def exit_code(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.code = -9


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(("stopped", "blamed"), [(False, {"7": 1}), (True, {})])
def test_a_child_that_we_kill_counts_against_no_group(
    settings: Settings,
    database: Database,
    clock: Clock,
    new_run: NewRun,
    fake_trainer: FakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    stopped: bool,
    blamed: dict[str, int],
) -> None:
    child = Child(None)
    schedule = Schedule(settings, database, lambda _: child, clock=clock)
    schedule.poll()
    run_id = schedule._run_id

    class Died(BaseException):
        """As if the process were gone: nothing after it runs."""

    def die(job: TrainingJob) -> None:
        report_place(database, run_id, "7")
        raise Died

    fake_trainer.on_train = die
    run = new_run(run_id, fake_trainer)
    monkeypatch.setattr(run, "_fail", lambda error: None)  # a dead process records nothing
    with pytest.raises(Died):
        run.start()

    if stopped:
        schedule.stop()
    else:
        child.code = -9
        schedule.poll()

    assert attempts(database) == blamed
    with database.read() as session:
        assert session.get_one(RunRow, run_id).status == "failed"
