"""Save and load exchanges, and keep the bus records that could not be stored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import ColumnElement, Select, and_, select, tuple_, update
from sqlalchemy.orm import Session

from ingest.errors import UnreadableExchangesError
from ingest.sessions.records import Place
from ingest.store.places import place_columns, place_of
from sidecar.records import Choice, Exchange
from sidecar.store.database import DAMAGE, check_id, insert_into
from sidecar.store.mapping import RowMapping
from sidecar.store.models import ChoiceRow, DeadLetterRow, ExchangeRow

NEW = "new"
"""`exchange.selection` of an exchange that selection has not examined."""
_EXCHANGE = RowMapping(Exchange, ExchangeRow, other_tables={"choices"})
_CHOICE = RowMapping(Choice, ChoiceRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExchange:
    """An exchange and what ingest decided about it."""

    exchange: Exchange
    held_out: bool
    selection: str
    place: Place
    stored_at: float
    """Unix seconds."""

    @property
    def session_id(self) -> str:
        return self.place.session


def save_exchange(
    session: Session,
    exchange: Exchange,
    *,
    held_out: bool,
    now: float,
    doubt: str | None = None,
    place: Place | None = None,
) -> bool:
    """Store an exchange and its choices, in the caller's transaction.

    place: where it stands in its session; None: its session is the one that its key names.
    doubt: why it must not be learned from; used when the proxy gave no reason.
    Returns: False when this exchange id is stored already; then nothing changes.
    Raises: ValueError or OverflowError when a row cannot hold a value (a token id of 2**31 or more,
    two choices of one index). Then nothing was written.
    """
    _check_indices([choice.index for choice in exchange.choices])
    row = {
        **_EXCHANGE.to_row(exchange),
        "untrainable_reason": exchange.untrainable_reason or doubt,
        "stored_at": now,
        "started_at": exchange.timings.started_at,  # a column of its own, to be searched by
        "held_out": held_out,
        **({"session_id": exchange.session_key} if place is None else place_columns(place)),
        "selection": NEW,
    }
    choices = [
        {**_CHOICE.to_row(choice), "exchange_id": exchange.exchange_id}
        for choice in exchange.choices
    ]
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


def load_by_seq(session: Session, seqs: Collection[int]) -> list[StoredExchange]:
    """Read these exchanges, the oldest first. Raises: UnreadableExchangesError."""
    return _load(
        session, select(ExchangeRow).where(ExchangeRow.seq.in_(seqs)).order_by(ExchangeRow.seq)
    )


def any_with(session: Session, selection: str) -> bool:
    """True when an exchange has this value of `selection`."""
    statement = select(ExchangeRow.seq).where(ExchangeRow.selection == selection).limit(1)
    return session.scalar(statement) is not None


def load_by_selection(
    session: Session, selection: str, *, limit: int, newest_first: bool = False
) -> list[StoredExchange]:
    """Read up to `limit` exchanges with this value of `selection`, the oldest first by default.

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
    """Read the exchanges of these turns (project, turn id) that have this value of `selection`.

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
    """Find those of these turns that have an exchange with one of these values of `selection`."""
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
        # No caller reads these rows again in its session: there is nothing to refresh.
        .execution_options(synchronize_session=False)
    )


def put_aside(session: Session, seqs: Collection[int], selection: str) -> None:
    """Store why damaged exchanges are left out. `seqs`: an id may be damaged too."""
    session.execute(
        update(ExchangeRow)
        .where(ExchangeRow.seq.in_(seqs))
        .values(selection=selection)
        .execution_options(synchronize_session=False)
    )


def dead_letter(session: Session, payload: bytes, *, reason: str, now: float) -> None:
    """Keep the whole of a bus record that cannot be stored as an exchange."""
    session.add(DeadLetterRow(at=now, reason=reason, payload=payload))
    session.flush()


def _of_turns(turns: Collection[tuple[str, str]]) -> ColumnElement[bool]:
    # The turn id alone finds them by its index; the project tells two of one id apart.
    ids = {turn_id for _, turn_id in turns}
    pairs = tuple_(ExchangeRow.project, ExchangeRow.turn_id).in_(sorted(turns))
    return and_(ExchangeRow.turn_id.in_(sorted(ids)), pairs)


def _check_indices(indices: Sequence[int]) -> None:
    if len(set(indices)) != len(indices) or not all(0 <= index < 2**31 for index in indices):
        raise ValueError(f"choices are not numbered one by one: {indices}")


def _load(session: Session, statement: Select[ExchangeRow]) -> list[StoredExchange]:
    """Read exchanges in one query. If that fails, read them one by one to find damaged ones."""
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
            exchange=_EXCHANGE.to_record(
                row, choices=tuple(map(_CHOICE.to_record, choices[check_id(row.exchange_id)]))
            ),
            held_out=msgspec.convert(row.held_out, bool),
            selection=row.selection,
            place=place_of(row),
            stored_at=msgspec.convert(row.stored_at, float),
        )
        for row in rows
    ]
