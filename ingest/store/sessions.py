"""Where exchanges stand in their sessions, in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from ingest.sessions.arrival import read_arrival
from ingest.sessions.records import Arrival, Place
from sidecar.records import Exchange
from sidecar.store.database import DAMAGE, decompress
from sidecar.store.models import ChoiceRow, ExchangeRow, GroupRow

PAGE: Final = 256
"""Exchanges read at once: 2 MB of ordinary bodies."""
_ROW = ExchangeRow
_COLUMNS: Final = (
    *(_ROW.exchange_id, _ROW.started_at, _ROW.stored_at, _ROW.project, _ROW.key_id, _ROW.user),
    *(_ROW.session_key, _ROW.trace_id, _ROW.turn_id, _ROW.request_body, _ROW.session_id),
    *(_ROW.parent_id, _ROW.turn, _ROW.branch, _ROW.segment, _ROW.placed_by, _ROW.held_out),
)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Placed:
    """An exchange of the store, as the session tree needs it."""

    arrival: Arrival
    place: Place
    held_out: bool
    stored_at: float


def newest_placed(
    session: Session, *, since: float, limit: int, limit_bytes: int
) -> Iterator[Placed]:
    """Yield the newest exchanges, the oldest of them first. Damaged ones are left out.

    since: `stored_at`, Unix seconds. limit_bytes: of request bodies as they are stored.
    """
    sizes = session.execute(
        select(ExchangeRow.seq, func.length(ExchangeRow.request_body))
        .where(ExchangeRow.stored_at >= since)
        .order_by(ExchangeRow.seq.desc())
        .limit(limit)
    ).all()
    total, seqs = 0, []
    for seq, size in sizes:
        total += size or 0
        if total > limit_bytes:
            break
        seqs.append(seq)
    seqs.reverse()
    for at in range(0, len(seqs), PAGE):
        yield from _placed(session, seqs[at : at + PAGE])


def _placed(session: Session, seqs: Sequence[int]) -> Iterator[Placed]:
    rows = session.execute(
        select(*_COLUMNS).where(ExchangeRow.seq.in_(seqs)).order_by(ExchangeRow.seq)
    ).all()
    messages: dict[str, list[bytes]] = {row.exchange_id: [] for row in rows}
    for exchange_id, body in session.execute(
        select(ChoiceRow.exchange_id, ChoiceRow.message_body)
        .where(ChoiceRow.exchange_id.in_(messages))
        .order_by(ChoiceRow.exchange_id, ChoiceRow.index)
    ):
        messages[exchange_id].append(body)
    for row in rows:
        try:
            yield _read(row, messages[row.exchange_id])
        except DAMAGE as error:
            log.error("exchange_unreadable", exchange_id=row.exchange_id, why=str(error))


def _read(row: Any, messages: Sequence[bytes]) -> Placed:  # Any: a row of `_COLUMNS`
    return Placed(
        read_arrival(
            exchange_id=row.exchange_id,
            at=row.started_at,
            project=row.project,
            key_id=row.key_id,
            user=row.user,
            session_key=row.session_key,
            trace_id=row.trace_id,
            turn_id=row.turn_id,
            request=decompress(row.request_body),
            messages=[decompress(body) for body in messages],
        ),
        Place(
            exchange_id=row.exchange_id,
            session=row.session_id,
            parent=row.parent_id,
            turn=row.turn,
            branch=row.branch,
            segment=row.segment,
            how=row.placed_by,
        ),
        row.held_out,
        row.stored_at,
    )


def place_columns(place: Place | None, exchange: Exchange) -> dict[str, object]:
    """The columns of a place; None: the exchange has none."""
    if place is None:
        return {"session_id": exchange.session_key}
    return {
        "session_id": place.session,
        "parent_id": place.parent,
        "turn": place.turn,
        "branch": place.branch,
        "segment": place.segment,
        "placed_by": place.how,
    }


def save_moves(session: Session, moves: Iterable[Place], held_out: Mapping[str, bool]) -> None:
    """Store where exchanges stand now, and whether their sessions are held out."""
    for place in moves:
        session.execute(
            update(ExchangeRow)
            .where(ExchangeRow.exchange_id == place.exchange_id)
            .values(
                session_id=place.session,
                parent_id=place.parent,
                turn=place.turn,
                branch=place.branch,
                segment=place.segment,
                placed_by=place.how,
            )
            .execution_options(synchronize_session=False)
        )
        session.execute(
            update(GroupRow)
            .where(GroupRow.exchange_id == place.exchange_id)
            .values(session_id=place.session)
            .execution_options(synchronize_session=False)
        )
    for name, held in held_out.items():
        session.execute(
            update(ExchangeRow)
            .where(ExchangeRow.session_id == name, ExchangeRow.held_out != held)
            .values(held_out=held)
            .execution_options(synchronize_session=False)
        )
