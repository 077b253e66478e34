"""GETs of the admin API for records: groups, runs, exchanges, the audit."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.auth import caller
from deploy.admin.context import AdminContext
from deploy.admin.json import read_stored
from deploy.admin.models import (
    AnswerOut,
    AuditOut,
    ChoiceOut,
    ExchangeOut,
    GroupDetailOut,
    GroupOut,
    Page,
    RunOut,
)
from deploy.admin.paging import DEFAULT_LIMIT, Cursor, Limit, encode_cursor, newest_first, page
from deploy.errors import UnknownRecordError
from sidecar.store.arrays import unpack_ids
from sidecar.store.database import decompress
from sidecar.store.models import AnswerRow, AuditRow, ChoiceRow, ExchangeRow, GroupRow, RunRow


def record_router(context: AdminContext) -> APIRouter:
    """Return the router of the GETs for records."""
    router = APIRouter(dependencies=[Depends(caller)])
    _add_groups(router, context)
    _add_history(router, context)
    return router


def _add_groups(router: APIRouter, context: AdminContext) -> None:
    database = context.database

    @router.get("/groups")
    def groups(
        limit: Limit = DEFAULT_LIMIT,
        cursor: Cursor = None,
        status: str | None = None,
        reason: str | None = None,
    ) -> Page[GroupOut]:
        statement = select(GroupRow)
        if status is not None:
            statement = statement.where(GroupRow.status == status)
        if reason is not None:
            statement = statement.where(GroupRow.reason == reason)
        statement = newest_first(statement, limit=limit, cursor=cursor, key={GroupRow.seq: int})
        with database.read() as session:
            rows = session.scalars(statement).all()
        following = encode_cursor(rows[limit - 1].seq) if len(rows) > limit else None
        items = [GroupOut(**_group(row)) for row in rows[:limit]]
        return Page(items=items, next_cursor=following)

    @router.get("/groups/{group_id}")
    def group(group_id: str) -> GroupDetailOut:
        with database.read() as session:
            row = session.scalar(select(GroupRow).where(GroupRow.group_id == group_id))
            if row is None:
                raise UnknownRecordError(f"no group {group_id}")
            answers = session.scalars(
                select(AnswerRow).where(AnswerRow.group_id == group_id).order_by(AnswerRow.index)
            )
            return GroupDetailOut(**_group(row), answers=[_answer(answer) for answer in answers])


def _add_history(router: APIRouter, context: AdminContext) -> None:
    database, model = context.database, context.model

    @router.get("/runs")
    def runs(limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Page[RunOut]:
        statement = select(RunRow).where(RunRow.model == model)
        key = {RunRow.started_at: float, RunRow.run_id: str}
        statement = newest_first(statement, limit=limit, cursor=cursor, key=key)
        with database.read() as session:
            rows = session.scalars(statement).all()
        items = [run_out(row) for row in rows]
        return page(items, limit, lambda last: encode_cursor(last.started_at, last.run_id))

    @router.get("/exchanges/{exchange_id}")
    def exchange(exchange_id: str) -> ExchangeOut:
        with database.read() as session:
            return _exchange(session, exchange_id)

    @router.get("/audit")
    def audit(limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Page[AuditOut]:
        statement = newest_first(
            select(AuditRow), limit=limit, cursor=cursor, key={AuditRow.seq: int}
        )
        with database.read() as session:
            rows = session.scalars(statement).all()
        items = [AuditOut.model_validate(row) for row in rows]
        return page(items, limit, lambda last: encode_cursor(last.seq))


def run_out(row: RunRow) -> RunOut:
    """Convert a run's row to its reply."""
    return RunOut(**{name: getattr(row, name) for name in RunOut.model_fields})


def _group(row: GroupRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in GroupOut.model_fields}


def _answer(row: AnswerRow) -> AnswerOut:
    return AnswerOut(
        index=row.index,
        origin=row.origin,
        message=read_stored(decompress(row.message_body)),
        finish_reason=row.finish_reason,
        tokens=len(unpack_ids(row.token_ids)),
        temperature=row.temperature,
        untrainable_reason=row.untrainable_reason,
        score=row.score,
        explanation=row.explanation,
    )


def _exchange(session: Session, exchange_id: str) -> ExchangeOut:
    row = session.scalar(select(ExchangeRow).where(ExchangeRow.exchange_id == exchange_id))
    if row is None:
        raise UnknownRecordError(f"no exchange {exchange_id}; ingest stores it a little later")
    choices = session.scalars(
        select(ChoiceRow).where(ChoiceRow.exchange_id == exchange_id).order_by(ChoiceRow.index)
    )
    group = select(GroupRow.group_id).where(GroupRow.exchange_id == exchange_id)
    plain = {
        name: getattr(row, name)
        for name in ExchangeOut.model_fields
        if name not in {"prompt_tokens", "group_id", "request", "choices"}
    }
    return ExchangeOut(
        **plain,
        prompt_tokens=len(unpack_ids(row.prompt_token_ids)),
        group_id=session.scalar(group),
        request=read_stored(decompress(row.request_body)),
        choices=[
            ChoiceOut(
                index=choice.index,
                message=read_stored(decompress(choice.message_body)),
                finish_reason=choice.finish_reason,
                tokens=len(unpack_ids(choice.token_ids)),
            )
            for choice in choices
        ],
    )
