"""Read the rows that retention looks at, a page at a time, in the order of `seq`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.orm import Session

from ingest.retention.rules import Held
from sidecar.store.models import (
    AnswerRow,
    ChoiceRow,
    DeadLetterRow,
    ExchangeRow,
    FeedbackRow,
    GroupRow,
    JudgeCallRow,
)

PAGE: Final = 200
"""Rows that are looked at in one step, without the write lock."""
OF_A_COMPARISON: Final = "c-"
"""Beginning of `judge_call.group_id` when the gate asked."""


def held_after(session: Session, after: int) -> list[Held]:
    """Read exchanges behind a row, with their sizes and the state of their group."""
    replies = (
        select(func.sum(_lengths(ChoiceRow)))
        .where(ChoiceRow.exchange_id == ExchangeRow.exchange_id)
        .scalar_subquery()
    )
    answers = (
        # What verifiers found is stored as ASCII, so characters are bytes.
        select(func.sum(_lengths(AnswerRow) + func.coalesce(func.length(AnswerRow.checks), 0)))
        .where(AnswerRow.group_id == GroupRow.group_id)
        .scalar_subquery()
    )
    rows = session.execute(
        select(
            ExchangeRow.seq,
            ExchangeRow.exchange_id,
            ExchangeRow.stored_at,
            func.length(ExchangeRow.request_body) + func.length(ExchangeRow.prompt_token_ids),
            replies,
            answers,
            GroupRow.status,
        )
        .outerjoin(GroupRow, GroupRow.exchange_id == ExchangeRow.exchange_id)
        .where(ExchangeRow.seq > after)
        .order_by(ExchangeRow.seq)
        .limit(PAGE)
    )
    return [
        Held(
            seq=seq,
            exchange_id=exchange_id,
            # A damaged time: it goes by the size of the store only.
            stored_at=stored_at if isinstance(stored_at, float) else float("inf"),
            stored_bytes=sum(size for size in sizes if isinstance(size, int)),
            group_status=status,
        )
        for seq, exchange_id, stored_at, *sizes, status in rows
    ]


def judge_calls_after(session: Session, after: int) -> Sequence[Any]:
    """Read replies of the judge behind a row."""
    row = JudgeCallRow
    # Of the others the reply is not read: it may be long.
    said = case((row.group_id.startswith(OF_A_COMPARISON), row.reply != ""), else_=True)
    return session.execute(
        select(row.seq, row.group_id, row.at, said.label("said"))
        .where(row.seq > after)
        .order_by(row.seq)
        .limit(PAGE)
    ).all()


def feedback_after(session: Session, after: int) -> Sequence[Any]:
    """Read feedback behind a row."""
    row = FeedbackRow
    return session.execute(
        select(row.seq, row.exchange_id, row.stored_at)
        .where(row.seq > after)
        .order_by(row.seq)
        .limit(PAGE)
    ).all()


def dead_letters_after(session: Session, after: int) -> Sequence[Any]:
    """Read dead letters behind a row, without what they say."""
    row = DeadLetterRow
    return session.execute(
        select(row.seq, row.at, func.length(row.payload).label("size"))
        .where(row.seq > after)
        .order_by(row.seq)
        .limit(PAGE)
    ).all()


def _lengths(table: type[ChoiceRow] | type[AnswerRow]) -> ColumnElement[int]:
    columns = (table.message_body, table.token_ids, table.logprobs)
    first, second, third = (func.length(column) for column in columns)
    return first + second + third
