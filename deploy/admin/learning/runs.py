"""GETs of the admin API for one training run: its record, and the figures of its steps."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.auth import caller
from deploy.admin.context import AdminContext
from deploy.admin.filters import known_query
from deploy.admin.models import Page, RunOut
from deploy.admin.out import Out
from deploy.admin.paging import DEFAULT_LIMIT, Cursor, Limit, encode_cursor, newest_first
from deploy.admin.records import naming, page_of, run_out
from deploy.admin.wire.scopes import PREFIX
from deploy.errors import UnknownRecordError
from sidecar.lines import public_model
from sidecar.store.models import RunRow, RunStepRow


class RunStepOut(Out):
    """One optimiser step of a run."""

    step: int
    at: float
    """When it was done."""
    figures: dict[str, Any]
    """As the data dictionary has them under "One optimiser step"."""


def run_router(context: AdminContext) -> APIRouter:
    """Return the router of the GETs for one run."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(caller), Depends(known_query)])
    database, model = context.database, context.model

    @router.get("/runs/{run_id}")
    def run(run_id: str) -> RunOut:
        with database.read() as session, naming(f"run {run_id}"):
            return run_out(_find(session, model, run_id))

    @router.get("/runs/{run_id}/steps")
    def steps(run_id: str, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Page[RunStepOut]:
        """The steps that are done, the newest first; of a run that failed, those before it did."""
        statement = select(RunStepRow).where(RunStepRow.run_id == run_id)
        statement = newest_first(
            statement, "steps", limit=limit, cursor=cursor, key={RunStepRow.step: int}
        )
        with database.read() as session:
            _find(session, model, run_id)
            rows = session.scalars(statement).all()
        return page_of(
            rows,
            limit,
            show=lambda row: RunStepOut(step=row.step, at=row.at, figures=row.body),
            name=lambda row: f"step {row.step} of run {run_id}",
            cursor=lambda row: encode_cursor("steps", row.step),
        )

    return router


def _find(session: Session, model: str, run_id: str) -> RunRow:
    """Raises: UnknownRecordError."""
    row = session.get(RunRow, run_id)
    if row is None or public_model(row.model) != model:
        raise UnknownRecordError(f"no run {run_id}; `sidecar runs ls` has them")
    return row
