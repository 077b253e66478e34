"""APScheduler's job store in the project's own table, as text and without pickles.

APScheduler stores a job as a pickle, which runs whatever code its bytes name. Here a row says in
JSON which trigger the settings asked for, and its next time; the function is the one that this
process has. So a row can only say when. One row for each model: `schedule_job`.

A row that cannot be read, or that says nothing of the present settings, costs itself: it is logged,
deleted, and made anew (`learner.schedule.rule`). A store that is away costs a delay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import structlog
from apscheduler.job import Job
from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.triggers.base import BaseTrigger
from sqlalchemy import Engine, Row, Table, insert, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from sidecar.store.models import ScheduleJobRow

log = structlog.get_logger()

AGAIN_S = 5.0
"""Seconds until a store that is away is asked again."""
SLACK = timedelta(seconds=1)
"""A row may name a time that is later than the trigger's by this: both are rounded."""
CRON_STEP = timedelta(seconds=1)
"""Less than the time between two turns of a cron expression, which are a minute apart."""
TURN = "turn"
"""What a job does, as a row names it."""


class JobState(msgspec.Struct, forbid_unknown_fields=True):
    """What a row says. Text of the column `job_state`."""

    does: str
    trigger: str
    """The trigger in words, as `turns.trigger_name` has it: a row of other settings is replaced."""


class TextJobStore(SQLAlchemyJobStore):  # type: ignore[misc]  # apscheduler is not typed
    """Keeps the one job of a model."""

    def __init__(
        self,
        engine: Engine,
        *,
        job_id: str,
        trigger: BaseTrigger,
        trigger_name: str,
        act: Callable[[], None],
    ) -> None:
        """act: what the job does. trigger_name: `trigger` in words, which the row keeps."""
        super().__init__(engine=engine)
        self.jobs_t = cast(Table, ScheduleJobRow.__table__)
        self._job_id = job_id
        self._trigger = trigger
        self._trigger_name = trigger_name
        self._act = act

    def start(self, scheduler: Any, alias: str) -> None:
        # The table is a migration's: APScheduler makes none.
        super(SQLAlchemyJobStore, self).start(scheduler, alias)

    def shutdown(self) -> None:
        """Leave the engine, which is the whole process's, as it is."""

    def add_job(self, job: Job) -> None:
        try:
            with self.engine.begin() as connection:
                connection.execute(insert(self.jobs_t).values(self._values(job)))
        except IntegrityError as error:
            raise ConflictingIdError(job.id) from error

    def update_job(self, job: Job) -> None:
        """Store the job's next time. A store that is away is logged: the job is then due again,
        which asks for the same run twice."""
        found = self._guarded(lambda: self._update(job))
        if found == 0:
            raise JobLookupError(job.id)

    def get_due_jobs(self, now: datetime) -> list[Job]:
        job = self._guarded(lambda: self.lookup_job(self._job_id))
        return [job] if job is not None and job.next_run_time <= now else []

    def get_next_run_time(self) -> datetime | None:
        """Return when the job is due; soon, while the store is away."""
        try:
            job = self.lookup_job(self._job_id)
        except SQLAlchemyError as error:
            self._say_away(error)
            return datetime.now(UTC) + timedelta(seconds=AGAIN_S)
        return None if job is None else job.next_run_time

    def get_all_jobs(self) -> list[Job]:
        job = self.lookup_job(self._job_id)
        return [] if job is None else [job]

    def lookup_job(self, job_id: str) -> Job | None:
        """Read the job; a row that is damaged or of other settings is deleted (logged)."""
        with self.engine.begin() as connection:
            row = connection.execute(
                self.jobs_t.select().where(self.jobs_t.c.id == job_id)
            ).one_or_none()
            if row is None:
                return None
            try:
                return self._job(row)
            except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, OSError) as error:
                log.warning("schedule_row_replaced", job=job_id, why=str(error))
                connection.execute(self.jobs_t.delete().where(self.jobs_t.c.id == job_id))
                return None

    def _job(self, row: Row[Any]) -> Job:
        state = msgspec.json.decode(row.job_state, type=JobState)
        if (state.does, state.trigger) != (TURN, self._trigger_name):
            raise ValueError(f"it is of {state.does!r} by {state.trigger!r}")
        at = row.next_run_time
        if not isinstance(at, int | float) or not math.isfinite(at):
            raise ValueError(f"its next time is {at!r}")
        now = datetime.now(UTC)
        # OSError, OverflowError or ValueError for a time outside the years 1 to 9999.
        stored = datetime.fromtimestamp(at, UTC)
        latest = latest_next(self._trigger, now)
        if latest is not None and stored > latest + SLACK:
            raise ValueError(f"its next time, {at:.0f}, is later than the schedule's")
        job = Job(
            self._scheduler,
            id=self._job_id,
            func=self._act,
            trigger=self._trigger,
            executor="default",
            args=(),
            kwargs={},
            misfire_grace_time=None,
            coalesce=True,
            max_instances=1,
            next_run_time=latest_missed(self._trigger, stored, now),
        )
        job._jobstore_alias = self._alias
        return job

    def _update(self, job: Job) -> int:
        with self.engine.begin() as connection:
            statement = update(self.jobs_t).where(self.jobs_t.c.id == job.id)
            return int(connection.execute(statement.values(self._values(job))).rowcount)

    def _values(self, job: Job) -> dict[str, object]:
        state = JobState(does=TURN, trigger=self._trigger_name)
        return {
            "id": job.id,
            "next_run_time": job.next_run_time.timestamp(),
            "job_state": msgspec.json.encode(state).decode(),
        }

    def _guarded(self, work: Callable[[], Any]) -> Any:  # Any: apscheduler is not typed
        try:
            return work()
        except SQLAlchemyError as error:
            self._say_away(error)
            return None

    def _say_away(self, error: SQLAlchemyError) -> None:
        log.warning("schedule_not_stored", why=type(error).__name__, again_in_s=AGAIN_S)


def latest_next(trigger: BaseTrigger, now: datetime) -> datetime | None:
    """Return the latest time that the next turn can have; None when there is no turn any more.

    An interval keeps the rhythm of the process that began it, in any phase to the trigger of this
    process, whose first time is an interval after its own start.
    """
    interval = getattr(trigger, "interval", None)
    if isinstance(interval, timedelta):
        return now + interval
    found: datetime | None = trigger.get_next_fire_time(None, now)
    return found


def latest_missed(trigger: BaseTrigger, at: datetime, now: datetime) -> datetime:
    """Return the last of the times from `at` to `now`; `at` when it is still to come.

    Times that were missed count as one. APScheduler would make a list of them all, which for an
    interval of a second and a month away are millions.
    """
    if at >= now:
        return at
    interval = getattr(trigger, "interval", None)
    if isinstance(interval, timedelta):
        return at + (now - at) // interval * interval
    return _last_between(trigger, at, now)


def _last_between(trigger: BaseTrigger, at: datetime, now: datetime) -> datetime:
    """Return the last time of a cron trigger from `at` to `now`; `at` when there is none.

    The first time after a moment only grows with the moment, so halving finds it: 36 questions for
    a thousand years.
    """
    found, low, high = at, at, now
    while high - low >= CRON_STEP:
        middle = low + (high - low) / 2
        first = trigger.get_next_fire_time(None, middle)
        if first is not None and first <= now:
            found, low = first, middle
        else:
            high = middle
    return found
