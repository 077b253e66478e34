"""Derive signals from exchanges as they are placed in their sessions, or again from the store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.feedback.signals import Signal, Turn, between, tool_error, turn_of
from ingest.sessions.arrival import conversation_of
from ingest.sessions.records import Kin
from ingest.store.exchanges import StoredExchange
from ingest.store.pages import decoded_columns, decoded_sizes, pages_of, read_pages
from sidecar.store.models import ExchangeRow

MOST = 10_000
"""Exchanges of a session from which its signals are derived again, the first."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An exchange with its kin, and by which rule it says that a tool failed."""

    stored: StoredExchange
    kin: Kin
    tool_error: str | None


def derive(session: Session, placed: Sequence[Placed]) -> list[Signal]:
    """Return what exchanges that are placed now show. session: may be a reader's.

    Most exchanges have no siblings and no failed tool: nothing is read for them.
    """
    known = {one.stored.exchange.exchange_id: one.stored for one in placed}
    wanted = {name for one in placed for name in (*one.kin.siblings, *one.kin.adopted)}
    for stored in _load(session, wanted - known.keys()):
        known[stored.exchange.exchange_id] = stored
    turns: dict[str, Turn] = {}
    found: list[Signal] = []
    for one in placed:
        own = one.stored.exchange.exchange_id
        if one.tool_error is not None and one.stored.place.parent is not None:
            found.append(_failed(one.stored, one.stored.place.parent, one.tool_error))
        for child in one.kin.adopted:
            below = known.get(child)
            if below is not None and (rule := _tool_error(below)):
                found.append(_failed(below, own, rule))
        if one.kin.siblings:
            found += _between([own, *one.kin.siblings], known, turns, one.stored.place.parent)
        if len(one.kin.adopted) > 1:
            found += _between(one.kin.adopted, known, turns, own)
    return found


def derive_session(session: Session, session_id: str) -> list[Signal]:
    """Derive the signals of a stored session again, but for abandonment; sorted."""
    rows = session.execute(
        select(ExchangeRow.seq, *decoded_columns())
        .where(ExchangeRow.session_id == session_id)
        .order_by(ExchangeRow.seq)
        .limit(MOST)
    ).all()
    families: dict[str | None, list[Turn]] = {}
    found: list[Signal] = []
    sizes = ((seq, sum(decoded_sizes(*columns))) for seq, *columns in rows)
    for page, _ in read_pages(session, pages_of(sizes)):
        for stored in page:
            parent = stored.place.parent
            turn = turn_of(stored.exchange, session_id=session_id, parent=parent)
            families.setdefault(parent, []).append(turn)
            if parent is not None and (rule := _tool_error(stored)):
                found.append(_failed(stored, parent, rule))
    for family in families.values():
        found += between(family)
    return first_of_each(found)


def first_of_each(signals: Iterable[Signal]) -> list[Signal]:
    """Keep of each exchange and kind the signal that showed first; sorted."""
    kept: dict[tuple[str, str], Signal] = {}
    for signal in sorted(signals, key=lambda one: (one.at, one.by_id or "")):
        kept.setdefault((signal.exchange_id, signal.kind), signal)
    return [kept[key] for key in sorted(kept)]


def _between(
    names: Sequence[str],
    known: dict[str, StoredExchange],
    turns: dict[str, Turn],
    parent: str | None,
) -> list[Signal]:
    family: list[Turn] = []
    for name in names:
        stored = known.get(name)
        if stored is None:  # another consumer has not stored it yet, or it is damaged
            continue
        if name not in turns:
            turns[name] = turn_of(
                stored.exchange, session_id=stored.place.session, parent=stored.place.parent
            )
        turn = turns[name]
        # The place in memory is newer than the stored one of an exchange that has just moved.
        family.append(turn if turn.parent == parent else replace(turn, parent=parent))
    return between(family)


def _failed(stored: StoredExchange, parent: str, rule: str) -> Signal:
    exchange = stored.exchange
    return Signal(
        kind="tool_error",
        exchange_id=parent,
        by_id=exchange.exchange_id,
        session_id=stored.place.session,
        at=exchange.timings.started_at,
        evidence={"rule": rule},
    )


def _tool_error(stored: StoredExchange) -> str | None:
    request = stored.exchange.request
    return tool_error(conversation_of(request).messages, request)


def _load(session: Session, names: Collection[str]) -> list[StoredExchange]:
    if not names:
        return []
    rows = session.execute(
        select(ExchangeRow.seq, *decoded_columns())
        .where(ExchangeRow.exchange_id.in_(sorted(names)))
        .order_by(ExchangeRow.seq)
    ).all()
    sizes = ((seq, sum(decoded_sizes(*columns))) for seq, *columns in rows)
    return [stored for page, _ in read_pages(session, pages_of(sizes)) for stored in page]
