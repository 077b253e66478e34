"""Exchanges in the store: record to row and back, and the records that could not be read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import ColumnElement, Select, and_, select, tuple_, update
from sqlalchemy.orm import Session

from ingest.errors import UnreadableExchangesError
from sidecar.records import Choice, Exchange, Sampling, Timings
from sidecar.store.arrays import pack_floats, pack_ids, unpack_floats, unpack_ids
from sidecar.store.database import DAMAGE, check_id, compress, decompress, insert_into
from sidecar.store.models import ChoiceRow, DeadLetterRow, ExchangeRow

NEW = "new"
"""`exchange.selection` of an exchange that selection has not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExchange:
    """An exchange and what ingest decided about it."""

    exchange: Exchange
    held_out: bool
    selection: str


def save_exchange(
    session: Session, exchange: Exchange, *, held_out: bool, now: float, doubt: str | None = None
) -> bool:
    """Store an exchange and its choices, in the caller's transaction.

    doubt: why it must not be learned from, when the proxy saw no reason.
    Returns: False when this exchange id is already stored; then nothing is changed.
    Raises: ValueError or OverflowError, before anything is written, when a value has no place in
    a row (a token id of 2**31 or more, two choices of one index).
    """
    _check_indices([choice.index for choice in exchange.choices])
    row = _exchange_values(exchange, held_out=held_out, now=now)
    row["untrainable_reason"] = exchange.untrainable_reason or doubt
    choices = [_choice_values(exchange.exchange_id, choice) for choice in exchange.choices]
    statement = insert_into(session, ExchangeRow).on_conflict_do_nothing(
        index_elements=["exchange_id"]
    )
    inserted = session.scalars(statement.returning(ExchangeRow.seq), [row]).first()
    if inserted is None:
        return False
    if choices:
        session.execute(insert_into(session, ChoiceRow), choices)
    return True


def load_exchange(session: Session, exchange_id: str) -> StoredExchange | None:
    """Read one exchange; None when there is none of this id. Raises: UnreadableExchangesError."""
    found = _load(session, select(ExchangeRow).where(ExchangeRow.exchange_id == exchange_id))
    return found[0] if found else None


def any_with(session: Session, selection: str) -> bool:
    """Whether selection left an exchange in this place."""
    statement = select(ExchangeRow.seq).where(ExchangeRow.selection == selection).limit(1)
    return session.scalar(statement) is not None


def load_by_selection(
    session: Session, selection: str, *, limit: int, newest_first: bool = False
) -> list[StoredExchange]:
    """Read the exchanges that selection left in one place, oldest first unless told otherwise.

    Raises: UnreadableExchangesError.
    """
    order = ExchangeRow.seq.desc() if newest_first else ExchangeRow.seq
    return _load(
        session,
        select(ExchangeRow).where(ExchangeRow.selection == selection).order_by(order).limit(limit),
    )


def load_of_turns(
    session: Session, turns: Collection[tuple[str, str]], *, selection: str
) -> list[StoredExchange]:
    """Read the exchanges of these turns (project, turn id) that selection left in one place.

    Raises: UnreadableExchangesError.
    """
    if not turns:
        return []
    return _load(
        session,
        select(ExchangeRow)
        .where(_of_turns(turns), ExchangeRow.selection == selection)
        .order_by(ExchangeRow.seq),
    )


def turns_with(
    session: Session, turns: Collection[tuple[str, str]], *, selections: Collection[str]
) -> set[tuple[str, str]]:
    """Those of these turns that have an exchange which selection left in one of some places."""
    if not turns:
        return set()
    rows = session.execute(
        select(ExchangeRow.project, ExchangeRow.turn_id)
        .where(_of_turns(turns), ExchangeRow.selection.in_(selections))
        .distinct()
    )
    return {(project, turn_id) for project, turn_id in rows}


def set_selection(session: Session, exchange_ids: Sequence[str], selection: str) -> None:
    """Store what selection decided about these exchanges."""
    session.execute(
        update(ExchangeRow)
        .where(ExchangeRow.exchange_id.in_(exchange_ids))
        .values(selection=selection)
        # Nothing in the session is read again: looking for what to refresh would cost more.
        .execution_options(synchronize_session=False)
    )


def put_aside(session: Session, seqs: Collection[int], selection: str) -> None:
    """Store why damaged exchanges are not looked at; by number, for an id may be damaged too."""
    session.execute(
        update(ExchangeRow)
        .where(ExchangeRow.seq.in_(seqs))
        .values(selection=selection)
        .execution_options(synchronize_session=False)
    )


def dead_letter(session: Session, payload: bytes, *, reason: str, now: float) -> None:
    """Keep a bus record that cannot be stored as an exchange, whole."""
    session.add(DeadLetterRow(at=now, reason=reason, payload=payload))
    session.flush()


def _of_turns(turns: Collection[tuple[str, str]]) -> ColumnElement[bool]:
    # The turn id alone finds them by its index; the project tells two of one id apart.
    ids = {turn_id for _, turn_id in turns}
    pairs = tuple_(ExchangeRow.project, ExchangeRow.turn_id).in_(sorted(turns))
    return and_(ExchangeRow.turn_id.in_(sorted(ids)), pairs)


def _exchange_values(exchange: Exchange, *, held_out: bool, now: float) -> dict[str, object]:
    return {
        "exchange_id": exchange.exchange_id,
        "stored_at": now,
        "started_at": exchange.timings.started_at,
        "surface": exchange.surface,
        "public_model": exchange.public_model,
        "adapter": exchange.adapter,
        "arm": exchange.arm,
        "propensity": exchange.propensity,
        "replica": exchange.replica,
        "session_key": exchange.session_key,
        "held_out": held_out,
        "request_body": compress(exchange.request),
        "prompt_token_ids": pack_ids(exchange.prompt_token_ids),
        "sampling": msgspec.to_builtins(exchange.sampling),
        "timings": msgspec.to_builtins(exchange.timings),
        "stream": exchange.stream,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "untrainable_reason": exchange.untrainable_reason,
        "completion_tokens": exchange.completion_tokens,
        "returned_index": exchange.returned_index,
        "trace_id": exchange.trace_id,
        "project": exchange.project,
        "user": exchange.user,
        "key_id": exchange.key_id,
        "turn_id": exchange.turn_id,
        "retry_count": exchange.retry_count,
        "request_bytes": exchange.request_bytes,
        "reply_bytes": exchange.reply_bytes,
        "fallback_from": exchange.fallback_from,
        "selection": NEW,
    }


def _check_indices(indices: Sequence[int]) -> None:
    if len(set(indices)) != len(indices) or not all(0 <= index < 2**31 for index in indices):
        raise ValueError(f"choices are not numbered one by one: {indices}")


def _choice_values(exchange_id: str, choice: Choice) -> dict[str, object]:
    return {
        "exchange_id": exchange_id,
        "index": choice.index,
        "message_body": compress(choice.message),
        "finish_reason": choice.finish_reason,
        "token_ids": pack_ids(choice.token_ids),
        "logprobs": pack_floats(choice.logprobs),
    }


def _load(session: Session, statement: Select[ExchangeRow]) -> list[StoredExchange]:
    """Read exchanges, together, and only when that fails one by one to tell which is damaged."""
    try:
        return _stored(session, session.scalars(statement).all())
    except DAMAGE as error:
        seqs = session.scalars(statement.with_only_columns(ExchangeRow.seq)).all()
        damage = {seq: why for seq in seqs if (why := _damage(session, seq)) is not None}
        if not damage:
            raise
        raise UnreadableExchangesError(damage) from error


def _damage(session: Session, seq: int) -> str | None:
    try:
        _stored(session, session.scalars(select(ExchangeRow).where(ExchangeRow.seq == seq)).all())
    except DAMAGE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _stored(session: Session, rows: Sequence[ExchangeRow]) -> list[StoredExchange]:
    choices: dict[str, list[ChoiceRow]] = {row.exchange_id: [] for row in rows}
    found = session.scalars(
        select(ChoiceRow).where(ChoiceRow.exchange_id.in_(choices)).order_by(ChoiceRow.index)
    )
    for choice in found:
        choices[choice.exchange_id].append(choice)
    return [
        StoredExchange(
            exchange=_exchange(row, choices[row.exchange_id]),
            held_out=row.held_out,
            selection=row.selection,
        )
        for row in rows
    ]


def _exchange(row: ExchangeRow, choices: Sequence[ChoiceRow]) -> Exchange:
    values = {
        "exchange_id": check_id(row.exchange_id),
        "surface": row.surface,
        "public_model": row.public_model,
        "adapter": row.adapter,
        "arm": row.arm,
        "propensity": row.propensity,
        "replica": row.replica,
        "session_key": row.session_key,
        "request": decompress(row.request_body),
        "choices": tuple(_choice(choice) for choice in choices),
        "prompt_token_ids": unpack_ids(row.prompt_token_ids),
        "sampling": msgspec.convert(row.sampling, Sampling),
        "timings": msgspec.convert(row.timings, Timings),
        "stream": row.stream,
        "status": row.status,
        "outcome": row.outcome,
        "untrainable_reason": row.untrainable_reason,
        "completion_tokens": row.completion_tokens,
        "returned_index": row.returned_index,
        "trace_id": row.trace_id,
        "project": row.project,
        "user": row.user,
        "key_id": row.key_id,
        "turn_id": row.turn_id,
        "retry_count": row.retry_count,
        "request_bytes": row.request_bytes,
        "reply_bytes": row.reply_bytes,
        "fallback_from": row.fallback_from,
    }
    # Checked, not trusted: the Literal fields come back from the store as plain strings.
    return msgspec.convert(values, Exchange)


def _choice(row: ChoiceRow) -> Choice:
    return Choice(
        index=row.index,
        message=decompress(row.message_body),
        finish_reason=row.finish_reason,
        token_ids=unpack_ids(row.token_ids),
        logprobs=unpack_floats(row.logprobs),
    )
