"""The scheduled times in the store, on both stores: restarts, missed times, other settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import delete, update
from structlog.testing import capture_logs

from learner.schedule.loop import DUE_FLAG, Schedule
from sidecar.settings import Settings
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.models import ScheduleJobRow
from support.clock import Clock

pytestmark = pytest.mark.both_stores

HOUR = 3600.0


class Process:
    """A learner whose runs never start: it is paused."""

    def __init__(
        self, settings: Settings, database: Database, clock: Clock, **learner: Any
    ) -> None:
        changed = settings.learner.model_copy(update=learner)
        settings = settings.model_copy(update={"learner": changed})
        self.database, self.clock = database, clock
        self.schedule = Schedule(settings, database, lambda _: None, clock=clock)  # type: ignore[arg-type, return-value]
        with database.write() as session:
            set_flag(session, "learner_paused", "1", now=clock.now)

    def turns(self) -> bool:
        """Poll once. Returns: whether a time came round since the last call."""
        self.schedule.poll()
        with self.database.write() as session:
            due = get_flag(session, DUE_FLAG) == "1"
            set_flag(session, DUE_FLAG, "0", now=self.clock.now)
        return due

    @property
    def left_s(self) -> float:
        """Seconds until the next time."""
        with self.database.read() as session:
            return session.get_one(ScheduleJobRow, "m").next_run_time - self.clock.now


Start = Callable[..., Process]


@pytest.fixture
def process(settings: Settings, database: Database, clock: Clock) -> Start:
    """process(**learner settings): starts one."""
    return lambda **learner: Process(settings, database, clock, **learner)


def put(database: Database, **values: Any) -> None:
    with database.write() as session:
        session.execute(update(ScheduleJobRow).values(values))


def test_an_interval_keeps_its_rhythm_over_a_restart(process: Start, clock: Clock) -> None:
    """A process that restarts every hour runs every two hours all the same."""
    first = process(schedule="interval", interval_s=2 * HOUR)
    assert not first.turns()
    assert first.left_s == 2 * HOUR
    clock.now += HOUR

    again = process(schedule="interval", interval_s=2 * HOUR)

    assert not again.turns()
    assert again.left_s == HOUR
    clock.now += HOUR + 3
    assert again.turns()
    assert again.left_s == 2 * HOUR - 3
    assert not again.turns()


def test_times_missed_while_it_was_down_are_one_turn_at_once(process: Start, clock: Clock) -> None:
    process(schedule="interval", interval_s=2 * HOUR).turns()
    clock.now += 9 * HOUR

    again = process(schedule="interval", interval_s=2 * HOUR)

    assert again.turns()
    assert not again.turns()
    assert again.left_s == HOUR  # missed at 2, 4, 6 and 8; the next is at 10


def test_years_of_missed_minutes_of_a_cron_are_one_turn(process: Start, clock: Clock) -> None:
    process(schedule="cron", cron="* * * * *").turns()
    clock.now += 20_000 * 24 * HOUR

    again = process(schedule="cron", cron="* * * * *")

    assert again.turns()
    assert not again.turns()
    assert 0 < again.left_s <= 60


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "interval", "interval_s": HOUR},
        {"schedule": "cron", "cron": "* * * * *"},
    ],
)
def test_other_settings_begin_anew(process: Start, clock: Clock, changes: dict[str, Any]) -> None:
    process(schedule="interval", interval_s=2 * HOUR).turns()
    clock.now += 2 * HOUR + 1

    with capture_logs() as logs:
        here = process(**changes)
        assert not here.turns()

    assert 0 < here.left_s <= HOUR
    (replaced,) = [entry["was"] for entry in logs if entry["event"] == "schedule_row_replaced"]
    assert replaced == '{"does":"turn","trigger":"every 7200 s"}'


@pytest.mark.parametrize("later_s", [10 * HOUR, float("inf")])
def test_a_clock_that_is_set_back_lengthens_no_interval(
    process: Start, database: Database, clock: Clock, later_s: float
) -> None:
    here = process(schedule="interval", interval_s=2 * HOUR)
    here.turns()
    put(database, next_run_time=clock.now + later_s)

    assert not here.turns()

    assert here.left_s == 2 * HOUR


def test_rows_of_other_models_are_left_alone(process: Start, database: Database) -> None:
    with database.write() as session:
        session.add(ScheduleJobRow(id="other", next_run_time=1.0, job_state="not ours"))

    assert not process(schedule="interval", interval_s=2 * HOUR).turns()
    assert not process(schedule="manual").turns()

    with database.read() as session:
        assert session.get_one(ScheduleJobRow, "other").job_state == "not ours"
        assert session.get(ScheduleJobRow, "m") is None, "a schedule without times drops its row"


def test_a_row_that_is_gone_is_made_again(process: Start, database: Database) -> None:
    here = process(schedule="interval", interval_s=2 * HOUR)
    here.turns()
    with database.write() as session:
        session.execute(delete(ScheduleJobRow))

    assert not here.turns()

    assert here.left_s == 2 * HOUR
