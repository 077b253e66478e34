"""Derive signals from exchanges as they are placed in their sessions, or again from the store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.feedback.signals import Signal, Turn, between, tool_error, turn_of
from ingest.sessions.arrival import conversation_of
from ingest.sessions.records import Family, Kin
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


@dataclass(frozen=True, slots=True)
class Derived:
    """What a batch shows."""

    signals: tuple[Signal, ...] = ()
    regrouped: tuple[Family, ...] = ()
    """Families that moves have changed: `signals` has all that they show, and what else is stored
    of them is wrong."""


def derive(session: Session, placed: Sequence[Placed], regrouped: Sequence[Family]) -> Derived:
    """Return what exchanges that are placed now show, and families whose members have moved.

    session: may be a reader's. placed: with their kin after the last of them was placed.
    Most exchanges have no siblings and no failed tool: nothing is read for them.
    """
    known = {one.stored.exchange.exchange_id: one.stored for one in placed}
    rules = {one.stored.exchange.exchange_id: one.tool_error for one in placed}
    wanted = {name for one in placed for name in one.kin.siblings}
    wanted.update(name for family in regrouped for name in family.children)
    for stored in _load(session, wanted - known.keys()):
        known[stored.exchange.exchange_id] = stored
    families = dict.fromkeys(regrouped)
    for one in placed:
        own = one.stored.exchange.exchange_id
        if one.kin.siblings or one.tool_error is not None:
            beside = tuple(sorted((own, *one.kin.siblings)))
            families[Family(one.kin.session, one.kin.parent, beside)] = None
    unread = {name for family in regrouped for name in family.children} - rules.keys()
    rules.update((name, _tool_error(known[name])) for name in unread if name in known)
    turns: dict[str, Turn] = {}
    found: list[Signal] = []
    for family in families:
        found += _shown_by(family, known, rules, turns)
    return Derived(tuple(found), tuple(regrouped))


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
            turn = turn_of(stored.exchange, session_id=session_id)
            families.setdefault(parent, []).append(turn)
            if parent is not None and (rule := _tool_error(stored)):
                found.append(_failed(stored, parent, rule, session_id=session_id))
    for parent, family in families.items():
        found += between(family, first=parent is None)
    return first_of_each(found)


def first_of_each(signals: Iterable[Signal]) -> list[Signal]:
    """Keep of each exchange and kind the signal that showed first; sorted."""
    kept: dict[tuple[str, str], Signal] = {}
    for signal in sorted(signals, key=lambda one: (one.at, one.by_id or "")):
        kept.setdefault((signal.exchange_id, signal.kind), signal)
    return [kept[key] for key in sorted(kept)]


def _shown_by(
    family: Family,
    known: Mapping[str, StoredExchange],
    rules: Mapping[str, str | None],
    turns: dict[str, Turn],
) -> list[Signal]:
    """Return what a family shows about its parent and about each other.

    rules: why members say that a tool failed, but for those that said it when they were stored.
    turns: members that are read already; others are added.
    """
    found: list[Signal] = []
    members = [name for name in family.children if name in known]
    """Without what another consumer has not stored yet, and what is damaged."""
    if family.parent is not None:
        for name in members:
            rule = rules.get(name)
            if rule is not None:
                found.append(_failed(known[name], family.parent, rule, session_id=family.session))
    if len(members) > 1:
        for name in members:
            if name not in turns:
                # The place in memory is newer than that of `known`: it may have moved just now.
                turns[name] = turn_of(known[name].exchange, session_id=family.session)
        found += between([turns[name] for name in members], first=family.parent is None)
    return found


def _failed(stored: StoredExchange, parent: str, rule: str, *, session_id: str) -> Signal:
    exchange = stored.exchange
    return Signal(
        kind="tool_error",
        exchange_id=parent,
        by_id=exchange.exchange_id,
        session_id=session_id,
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
