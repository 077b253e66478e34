"""GETs of the admin API for one training run: its record, and the figures of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.context import AdminContext
from deploy.admin.models import LearnerOut, RunDetailOut, RunOut, RunStepOut, ScheduleOut
from deploy.admin.paging import (
    encode_cursor,
    new_router,
)
from deploy.admin.records import damaged, naming, page_of
from deploy.errors import UnknownRecordError
from deploy.registry import switches as learner_switches
from learner.schedule.loop import SCHEDULE
from sidecar import conditions
from sidecar.lines import public_model
from sidecar.store.database import DAMAGE
from sidecar.store.models import RunRow, RunStepRow, ScheduleJobRow

# What the status and `GET /learner` say of the learner in one line of adapters.

OutT = TypeVar("OutT")


def read_learner(session: Session, model: str) -> LearnerOut:
    """Read the learner's switches and its newest run in a line; None for a run that is damaged.

    model: name of the line.
    """
    switches = learner_switches.read(session, model)
    newest = select(RunRow).where(RunRow.model == model).order_by(RunRow.started_at.desc())
    row = session.scalars(newest.limit(1)).first()
    schedule = conditions.read(session, SCHEDULE, model)
    return LearnerOut(
        paused=switches.paused,
        run_requested=switches.run_requested,
        last_run=None if row is None else shown(f"run {row.run_id}", lambda: RunOut.of_record(row)),
        allowed_actions=learner_switches.allowed_actions(switches),
        next_run_at=session.scalar(
            select(ScheduleJobRow.next_run_time).where(ScheduleJobRow.id == model)
        ),
        schedule=None
        if schedule is None
        else ScheduleOut(
            kind=schedule.code, why=schedule.message, at=schedule.at, again_at=schedule.until
        ),
    )


def shown(name: str, make: Callable[[], OutT]) -> OutT | None:
    """Make the part of a reply that shows one row. Returns: None when that row is damaged, because
    it must not hide the rest of the status."""
    try:
        return make()
    except DAMAGE as error:
        damaged(name, error)  # logs it
        return None


MOST_STEPS = 2_000
"""Steps of a run that are shown."""


def run_router(context: AdminContext) -> APIRouter:
    """Return the router of the GETs for one run."""
    router = new_router()
    database, model = context.database, context.model

    @router.get("/runs/{run_id}")
    def run(run_id: str) -> RunDetailOut:
        """One run, with its steps."""
        steps = select(RunStepRow).where(RunStepRow.run_id == run_id)
        steps = steps.order_by(RunStepRow.step.desc()).limit(MOST_STEPS)
        with database.read() as session, naming(f"run {run_id}"):
            row = _find(session, model, run_id)
            page = page_of(
                rows := session.scalars(steps).all()[::-1],
                len(rows),
                show=lambda row: RunStepOut(step=row.step, at=row.at, figures=row.body),
                name=lambda row: f"step {row.step} of run {run_id}",
                cursor=lambda row: encode_cursor("steps", row.step),
            )
            return RunDetailOut.of_record(row, steps=page.items, damaged=page.damaged)

    return router


def _find(session: Session, model: str, run_id: str) -> RunRow:
    """Raises: UnknownRecordError."""
    row = session.get(RunRow, run_id)
    if row is None or public_model(row.model) != model:
        raise UnknownRecordError(f"no run {run_id}; `sidecar runs ls` has them")
    return row
