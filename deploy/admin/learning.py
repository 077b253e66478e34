"""GETs of the admin API for one training run: its record, and the figures of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.context import AdminContext
from deploy.admin.models import LearnerOut, Page, RunDetailOut, RunStepOut, ScheduleOut
from deploy.admin.paging import (
    DEFAULT_LIMIT,
    Cursor,
    Limit,
    encode_cursor,
    new_router,
    newest_first,
)
from deploy.admin.records import damaged, naming, page_of, run_out
from deploy.errors import UnknownRecordError
from deploy.registry import switches as learner_switches
from learner.progress.watch import read_missing
from learner.schedule.loop import read_schedule_status
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
    schedule = read_schedule_status(session, model)
    return LearnerOut(
        paused=switches.paused,
        run_requested=switches.run_requested,
        last_run=None if row is None else shown(f"run {row.run_id}", lambda: run_out(row)),
        allowed_actions=learner_switches.allowed_actions(switches),
        next_run_at=session.scalar(
            select(ScheduleJobRow.next_run_time).where(ScheduleJobRow.id == model)
        ),
        schedule=None
        if schedule is None
        else ScheduleOut(
            kind=schedule.kind, why=schedule.why, at=schedule.at, again_at=schedule.again_at
        ),
        lacks=read_missing(session),
    )


def shown(name: str, make: Callable[[], OutT]) -> OutT | None:
    """Make the part of a reply that shows one row. Returns: None when that row is damaged, because
    it must not hide the rest of the status."""
    try:
        return make()
    except DAMAGE as error:
        damaged(name, error)  # logs it
        return None


def run_router(context: AdminContext) -> APIRouter:
    """Return the router of the GETs for one run."""
    router = new_router()
    database, model = context.database, context.model

    @router.get("/runs/{run_id}")
    def run(run_id: str) -> RunDetailOut:
        """One run, with all its steps."""
        steps = select(RunStepRow).where(RunStepRow.run_id == run_id).order_by(RunStepRow.step)
        with database.read() as session, naming(f"run {run_id}"):
            row = _find(session, model, run_id)
            page = steps_of(session.scalars(steps).all(), run_id)
            return RunDetailOut(**run_out(row).model_dump(), steps=page.items, damaged=page.damaged)

    @router.get("/runs/{run_id}/steps")
    def steps(run_id: str, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Page[RunStepOut]:
        """The steps that are done, the newest first; of a run that failed, those before it did."""
        statement = select(RunStepRow).where(RunStepRow.run_id == run_id)
        statement = newest_first(
            statement, "steps", limit=limit, cursor=cursor, key={RunStepRow.step: int}
        )
        with database.read() as session:
            _find(session, model, run_id)
            return steps_of(session.scalars(statement).all(), run_id, limit)

    return router


def steps_of(rows: Sequence[RunStepRow], run_id: str, limit: int | None = None) -> Page[RunStepOut]:
    """Return a page of the steps of a run; all of them without a limit."""
    return page_of(
        rows,
        len(rows) if limit is None else limit,
        show=lambda row: RunStepOut(step=row.step, at=row.at, figures=row.body),
        name=lambda row: f"step {row.step} of run {run_id}",
        cursor=lambda row: encode_cursor("steps", row.step),
    )


def _find(session: Session, model: str, run_id: str) -> RunRow:
    """Raises: UnknownRecordError."""
    row = session.get(RunRow, run_id)
    if row is None or public_model(row.model) != model:
        raise UnknownRecordError(f"no run {run_id}; `sidecar runs ls` has them")
    return row
