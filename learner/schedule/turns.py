"""The scheduled times of `learner.schedule`, which go on after a restart.

The next time is a row of the store. Times that passed while the learner was down count as one, and
that run starts at once; an interval goes on in its old rhythm. Other settings begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC

import structlog
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import delete
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from learner.schedule.cron import read_cron
from learner.schedule.job_store import TextJobStore
from sidecar.settings import Learner, Settings
from sidecar.store.database import Database
from sidecar.store.models import ScheduleJobRow

log = structlog.get_logger()

STORE = "store"
"""APScheduler's name of the job store that is a table."""


def trigger_of(learner: Learner) -> tuple[BaseTrigger, str] | None:
    """Return the trigger of a schedule with times, and the same in words; None for others.

    Raises: SettingsError when `learner.cron` is no cron expression.
    """
    if learner.schedule == "interval":
        seconds = int(learner.interval_s)
        return IntervalTrigger(seconds=seconds, timezone=UTC), f"every {seconds} s"
    if learner.schedule == "cron":
        zone = "" if learner.timezone == "UTC" else f" {learner.timezone}"
        return read_cron(learner), f"cron {learner.cron}{zone}"
    return None


def keep_turns(
    clock: BackgroundScheduler, settings: Settings, database: Database, act: Callable[[], None]
) -> Callable[[], None]:
    """Have `act` called at each scheduled time. The clock need not run yet.

    Returns: what makes the row again when it is gone; to be called again and again.
    Raises: SettingsError, as `trigger_of`.
    """
    model = settings.line.name
    found = trigger_of(settings.learner)
    if found is None:
        return lambda: None
    trigger, name = found
    # APScheduler's name of the table, as this line sees it: a job store holds one job.
    store = STORE if settings.line.project is None else f"{STORE} {model}"
    clock.add_jobstore(
        TextJobStore(database.engine, job_id=model, trigger=trigger, trigger_name=name, act=act),
        store,
    )

    def restore() -> None:
        try:
            if clock.get_job(model, store) is None:
                job = clock.add_job(
                    act,
                    trigger,
                    id=model,
                    jobstore=store,
                    replace_existing=True,
                    misfire_grace_time=None,
                    coalesce=True,
                )
                at = getattr(job, "next_run_time", None)  # none: the clock stops, nothing is stored
                if at is not None:
                    log.info("schedule_begins", trigger=name, next_at=at.isoformat())
        except SQLAlchemyError as error:
            log.warning("schedule_not_stored", why=type(error).__name__)

    return restore


def forget_turns(session: Session, model: str) -> None:
    """Delete the next time of a schedule that has none any more."""
    session.execute(delete(ScheduleJobRow).where(ScheduleJobRow.id == model))
