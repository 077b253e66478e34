"""What the status and `GET /learner` say of the learner in one line of adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.models import LearnerOut, ScheduleOut
from deploy.admin.records import damaged, run_out
from deploy.registry.learner import switches as learner_switches
from learner.progress.lacks import read_lacks
from learner.schedule.told import read_told
from sidecar.store.database import DAMAGE
from sidecar.store.models import RunRow, ScheduleJobRow

Out = TypeVar("Out")


def read_learner(session: Session, model: str) -> LearnerOut:
    """Read the learner's switches and its newest run in a line; None for a run that is damaged.

    model: name of the line.
    """
    switches = learner_switches.read(session, model)
    newest = select(RunRow).where(RunRow.model == model).order_by(RunRow.started_at.desc())
    row = session.scalars(newest.limit(1)).first()
    told = read_told(session, model)
    return LearnerOut(
        paused=switches.paused,
        run_requested=switches.run_requested,
        last_run=None if row is None else shown(f"run {row.run_id}", lambda: run_out(row)),
        allowed_actions=learner_switches.allowed_actions(switches),
        next_run_at=session.scalar(
            select(ScheduleJobRow.next_run_time).where(ScheduleJobRow.id == model)
        ),
        schedule=None
        if told is None
        else ScheduleOut(kind=told.kind, why=told.why, at=told.at, again_at=told.again_at),
        lacks=read_lacks(session),
    )


def shown(name: str, make: Callable[[], Out]) -> Out | None:
    """Make the part of a reply that shows one row. Returns: None when that row is damaged, because
    it must not hide the rest of the status."""
    try:
        return make()
    except DAMAGE as error:
        damaged(name, error)  # logs it
        return None
