"""The scheduled times in the store, on both stores: restarts, missed times, damaged rows."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import delete, update
from structlog.testing import capture_logs

from learner.schedule.job_store import latest_missed
from learner.schedule.loop import Clock
from learner.schedule.rule import Cron, keep_turns
from sidecar.errors import SettingsError
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import ScheduleJobRow

pytestmark = pytest.mark.both_stores

HOUR = 3600.0


class Process:
    """A learner's clock, as far as it has to do with scheduled times."""

    def __init__(self, settings: Settings, database: Database, **learner: Any) -> None:
        changed = settings.learner.model_copy(update=learner)
        settings = settings.model_copy(update={"learner": changed})
        self.turned = threading.Semaphore(0)
        self.clock = BackgroundScheduler(timezone=UTC)
        self.restore = keep_turns(self.clock, settings, database, self.turned.release)
        self.clock.start()
        self.restore()

    def turns(self) -> int:
        """Return how often it turned until now; a turn that is due comes within moments."""
        found = 0
        while self.turned.acquire(timeout=0.5):
            found += 1
        return found


@pytest.fixture
def process(settings: Settings, database: Database) -> Iterator[Callable[..., Process]]:
    """process(**learner settings): starts one; it ends with the test."""
    with ExitStack() as stack:

        def start(**learner: Any) -> Process:
            made = Process(settings, database, **learner)
            stack.callback(lambda: made.clock.running and made.clock.shutdown(wait=True))
            return made

        yield start


Start = Callable[..., Process]


def stored(database: Database) -> float | None:
    """The next time, seconds from now."""
    with database.read() as session:
        row = session.get(ScheduleJobRow, "m")
        return None if row is None else row.next_run_time - time.time()


def put(database: Database, **values: Any) -> None:
    with database.write() as session:
        session.execute(update(ScheduleJobRow).values(values))


def test_an_interval_goes_on_after_a_restart(process: Start, database: Database) -> None:
    """A process that restarts every hour runs every two hours all the same."""
    first = process(schedule="interval", interval_s=2 * HOUR)
    assert stored(database) == pytest.approx(2 * HOUR, abs=30)
    first.clock.shutdown()
    put(database, next_run_time=time.time() + HOUR)

    again = process(schedule="interval", interval_s=2 * HOUR)

    assert stored(database) == pytest.approx(HOUR, abs=30)
    assert again.turns() == 0


def test_an_interval_keeps_its_rhythm_over_a_restart(process: Start, database: Database) -> None:
    """The next time after the first turn is later than an interval after the restart."""
    process(schedule="interval", interval_s=2 * HOUR).clock.shutdown()
    at = time.time() + 3
    put(database, next_run_time=at)

    with capture_logs() as logs:
        again = process(schedule="interval", interval_s=2 * HOUR)
        assert again.turned.acquire(timeout=30)
        assert again.turns() == 0
        again.restore()

    with database.read() as session:
        assert session.get_one(ScheduleJobRow, "m").next_run_time == pytest.approx(at + 2 * HOUR)
    assert [entry for entry in logs if entry["event"] == "schedule_row_replaced"] == []


def test_times_missed_while_it_was_down_are_one_turn_at_once(
    process: Start, database: Database
) -> None:
    process(schedule="interval", interval_s=2 * HOUR).clock.shutdown()
    put(database, next_run_time=time.time() - 7 * HOUR)

    again = process(schedule="interval", interval_s=2 * HOUR)

    assert again.turns() == 1
    # Missed at -7, -5, -3 and -1 h; the rhythm stays, so the next is in an hour.
    assert stored(database) == pytest.approx(HOUR, abs=30)


def test_a_cron_time_missed_while_it_was_down_is_one_turn_at_once(
    process: Start, database: Database
) -> None:
    process(schedule="cron", cron="0 3 * * *").clock.shutdown()
    put(database, next_run_time=time.time() - 50 * HOUR)

    again = process(schedule="cron", cron="0 3 * * *")

    assert again.turns() == 1
    with database.read() as session:
        at = datetime.fromtimestamp(session.get_one(ScheduleJobRow, "m").next_run_time, UTC)
    assert (at.hour, at.minute) == (3, 0)
    assert 0 < at.timestamp() - time.time() <= 24 * HOUR


def test_a_month_of_missed_seconds_is_one_turn(process: Start, database: Database) -> None:
    process(schedule="interval", interval_s=3.0).clock.shutdown()
    put(database, next_run_time=time.time() - 720 * HOUR)
    began = time.monotonic()

    again = process(schedule="interval", interval_s=3.0)

    assert again.turned.acquire(timeout=30)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("days", [30, 20_000])
def test_years_of_missed_minutes_of_a_cron_are_one_turn(
    process: Start, database: Database, days: int
) -> None:
    """20,000 days are 28.8 million minutes."""
    process(schedule="cron", cron="* * * * *").clock.shutdown()
    put(database, next_run_time=time.time() - days * 24 * HOUR)

    again = process(schedule="cron", cron="* * * * *")

    assert again.turned.acquire(timeout=10)
    at = stored(database)
    assert at is not None
    assert 0 < at <= 60


@pytest.mark.parametrize(
    ("cron", "last"),
    [
        ("* * * * *", datetime(2026, 3, 4, 10, 30, tzinfo=UTC)),
        ("0 3 * * *", datetime(2026, 3, 4, 3, tzinfo=UTC)),
        ("*/5 * 1 1 *", datetime(2026, 1, 1, 23, 55, tzinfo=UTC)),
        ("0 0 29 2 *", datetime(2024, 2, 29, tzinfo=UTC)),
        ("0 11 4 3 *", datetime(2025, 3, 4, 11, tzinfo=UTC)),
    ],
)
def test_of_the_missed_times_of_a_cron_the_last_is_kept(cron: str, last: datetime) -> None:
    now = datetime(2026, 3, 4, 10, 30, 20, tzinfo=UTC)
    of_1970 = datetime(1970, 1, 1, tzinfo=UTC)
    trigger = Cron(cron)

    assert latest_missed(trigger, of_1970, now) == last
    assert latest_missed(trigger, last, now) == last


def test_a_missed_time_that_no_other_followed_stays() -> None:
    at = datetime(2026, 3, 4, 3, tzinfo=UTC)
    now = datetime(2026, 3, 4, 10, 30, tzinfo=UTC)

    assert latest_missed(Cron("0 3 * * *"), at, now) == at
    assert latest_missed(Cron("0 3 * * *"), now, at) == now


def test_an_interval_turns_again_and_again(process: Start) -> None:
    here = process(schedule="interval", interval_s=1.0)

    assert all(here.turned.acquire(timeout=30) for _ in range(3))


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "interval", "interval_s": HOUR},
        {"schedule": "cron", "cron": "* * * * *"},
    ],
)
def test_other_settings_begin_anew(
    process: Start, database: Database, changes: dict[str, Any]
) -> None:
    process(schedule="interval", interval_s=2 * HOUR).clock.shutdown()
    put(database, next_run_time=time.time() - 1)

    with capture_logs() as logs:
        here = process(**changes)

    assert here.turns() == 0
    at = stored(database)
    assert at is not None
    assert 0 < at < HOUR + 30
    (replaced,) = [entry["why"] for entry in logs if entry["event"] == "schedule_row_replaced"]
    assert replaced == "it is of 'turn' by 'every 7200 s'"


class _Trap:
    """What a pickle of it does when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import builtins; builtins.trap_has_sprung = True",))


DAMAGED: list[dict[str, Any]] = [
    {"job_state": "{"},
    {"job_state": '{"does":"turn"}'},
    {"job_state": '{"does":"os:system","trigger":"every 7200 s"}'},
    {"job_state": '{"does":"turn","trigger":"every 7200 s","args":[1]}'},
    {"job_state": pickle.dumps(_Trap(), 0).decode()},
    {"next_run_time": 1e300},
    {"next_run_time": 4e9},
    {"next_run_time": float("inf")},
    {"next_run_time": 1e17},
    {"next_run_time": -1e17},
    {"next_run_time": -9e10},
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_row_costs_itself_and_runs_nothing(
    process: Start, database: Database, damage: dict[str, Any]
) -> None:
    import builtins

    here = process(schedule="interval", interval_s=2 * HOUR)

    with capture_logs() as logs:  # the scheduler's own thread may be the first to see the row
        put(database, **damage)
        here.restore()

    assert "schedule_row_replaced" in [entry["event"] for entry in logs]
    assert stored(database) == pytest.approx(2 * HOUR, abs=30)
    assert not hasattr(builtins, "trap_has_sprung")
    assert here.turns() == 0


def test_rows_of_other_models_are_left_alone(process: Start, database: Database) -> None:
    with database.write() as session:
        session.add(ScheduleJobRow(id="other", next_run_time=1.0, job_state="not ours"))

    here = process(schedule="interval", interval_s=2 * HOUR)

    assert here.turns() == 0
    with database.read() as session:
        assert session.get_one(ScheduleJobRow, "other").job_state == "not ours"


def test_a_row_that_is_gone_is_made_again(process: Start, database: Database) -> None:
    here = process(schedule="interval", interval_s=2 * HOUR)
    with database.write() as session:
        session.execute(delete(ScheduleJobRow))

    here.restore()

    assert stored(database) == pytest.approx(2 * HOUR, abs=30)


def test_a_cron_expression_that_is_none_is_refused(settings: Settings, database: Database) -> None:
    with pytest.raises(SettingsError, match=r"learner\.cron"):
        Process(settings, database, schedule="cron", cron="every day")


def test_a_clock_that_stops_meanwhile_stores_and_tells_nothing(
    process: Start, database: Database
) -> None:
    made = process(schedule="interval", interval_s=HOUR)
    made.clock.shutdown(wait=True)
    with database.write() as session:
        session.execute(delete(ScheduleJobRow))

    with capture_logs() as logs:
        made.restore()

    assert (logs, stored(database)) == ([], None)


def test_a_stop_waits_for_a_tick_that_looks_for_its_schedule_meanwhile() -> None:
    clock, begun, found = Clock(timezone=UTC), threading.Event(), list[object]()

    def tick() -> None:
        begun.set()
        deadline = time.monotonic() + 60
        while clock.running and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)  # the stop waits for this tick now
        found.append(clock.get_job("none"))

    # Not a job without a trigger: APScheduler removes it after its start, and finds none in a clock
    # that was stopped meanwhile.
    clock.add_job(tick, IntervalTrigger(hours=1), next_run_time=datetime.now(UTC))
    clock.start()
    assert begun.wait(60)
    stop = threading.Thread(target=clock.shutdown, daemon=True)
    stop.start()
    stop.join(20)

    assert not stop.is_alive()
    assert found == [None]
