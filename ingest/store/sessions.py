"""Read the exchanges that the session tree remembers, store where they stand, and count groups."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from ingest.sessions.messages import Place
from ingest.store.exchanges import (
    StoredExchange,
    decoded_columns,
    decoded_sizes,
    pages_of,
    read_pages,
)
from ingest.store.groups import place_columns
from sidecar.feedback import Feedback
from sidecar.records import Exchange
from sidecar.routing.session_key import header_name, session_key
from sidecar.store.database import insert_into
from sidecar.store.models import (
    NAMED_OTHERWISE,
    ExchangeRow,
    FeedbackRow,
    ForgottenRow,
    GroupRow,
    SignalRow,
)


def newest_exchanges(
    session: Session, *, since: float, limit: int, limit_bytes: int
) -> Iterator[tuple[list[StoredExchange], int]]:
    """Yield the newest exchanges in pages, the oldest of them first, each page with the number of
    damaged ones that are left out of it.

    since: `stored_at`, Unix seconds. limit: rows that are looked at. limit_bytes: of requests.
    """
    newest = session.execute(
        select(ExchangeRow.seq, ExchangeRow.stored_at, *decoded_columns())
        .order_by(ExchangeRow.seq.desc())
        .limit(limit)
    ).all()
    total = 0
    sizes: list[tuple[int, int]] = []
    for seq, stored_at, *columns in newest:
        if stored_at < since:
            continue
        request, prompt = decoded_sizes(*columns)
        total += request
        if total > limit_bytes:
            break
        sizes.append((seq, request + prompt))
    yield from read_pages(session, pages_of(reversed(sizes)))


def stored_name(session: Session, name: str) -> str:
    """Return the name under which a session is stored: by that name, by another one that a client
    gave a part of it (then the session that has the newest part), or by either as the client sent
    it in `x-sidecar-session`, with `PROJECT/` before it where the project is not `default`. An
    unknown name is returned as it is."""
    for one in _names(name):
        if session.scalar(select(ExchangeRow.seq).where(ExchangeRow.session_id == one).limit(1)):
            return one
        found = session.scalar(
            select(ExchangeRow.session_id)
            .where(text(NAMED_OTHERWISE), ExchangeRow.session_key == one)
            .order_by(ExchangeRow.seq.desc())
            .limit(1)
        )
        if found is not None:
            return found
    return name


def _names(name: str) -> Iterator[str]:
    yield name
    sent = header_name(name.encode("utf-8", "surrogatepass"))
    project, _, rest = sent.partition("/")
    if rest:
        yield session_key(header=rest, user="", project=project)
    if sent:
        yield session_key(header=sent, user="")


def save_moves(session: Session, moves: Iterable[Place]) -> None:
    """Store where exchanges stand now. A move makes no session held out, but may end it."""
    trained: set[str] = set()
    for place in moves:
        if not place.held_out:
            trained.add(place.session)
        session.execute(
            update(ExchangeRow)
            .where(ExchangeRow.exchange_id == place.exchange_id)
            .values(place_columns(place))
            .execution_options(synchronize_session=False)
        )
        for row in (GroupRow, FeedbackRow, SignalRow):
            session.execute(
                update(row)
                .where(row.exchange_id == place.exchange_id)
                .values(session_id=place.session)
                .execution_options(synchronize_session=False)
            )
    if trained:
        session.execute(
            update(ExchangeRow)
            .where(ExchangeRow.session_id.in_(sorted(trained)), ExchangeRow.held_out)
            .values(held_out=False)
            .execution_options(synchronize_session=False)
        )


def count_by_session(
    session: Session, session_ids: Sequence[str], *, since: float
) -> dict[str, int]:
    """Count the groups that each of these sessions had; a session without one is left out.

    since: Unix seconds; older groups do not count, so that a session which never ends, or one that
        many conversations were put under, is learned from again.
    """
    rows = session.execute(
        select(GroupRow.session_id, func.count())
        .where(GroupRow.session_id.in_(session_ids), GroupRow.created_at >= since)
        .group_by(GroupRow.session_id)
    )
    return {row[0]: row[1] for row in rows}


# Names that were forgotten: records of them that arrive later are dropped.

Kind = Literal["user", "session", "session_key", "exchange", "source", "told"]
"""`source`: who sends feedback; `told`: an id of a user's sessions and traces. Both are of feedback
alone."""
SKEW_S = 60.0
"""The clocks of two machines may differ by this much."""


def name_digest(kind: str, name: str) -> str:
    """Return what is kept of a name, 64 hex digits; "" for an empty name."""
    if not name:
        return ""
    text = f"{kind}\0{name}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def save_forgotten(
    session: Session, kind: Kind, names: Collection[str], *, now: float, until: float | None
) -> None:
    """Have records of these names dropped when they arrive.

    until: requests that arrived later are recorded again, unix seconds; None: none is.
    Call it in a transaction that is alone: one that stores records either sees the names, or has
    ended before.
    """
    digests = sorted({name_digest(kind, name) for name in names} - {""})
    if not digests:
        return
    statement = insert_into(session, ForgottenRow)
    statement = statement.on_conflict_do_update(
        index_elements=["kind", "digest"], set_={"at": now, "until": statement.excluded.until}
    )
    session.execute(
        statement, [{"kind": kind, "digest": one, "at": now, "until": until} for one in digests]
    )


def any_forgotten(session: Session) -> bool:
    """Return True when a name was ever forgotten."""
    return session.scalar(select(ForgottenRow.at).limit(1)) is not None


def forgotten_among(session: Session, arrived: Mapping[str, tuple[Exchange, str]]) -> set[str]:
    """Return those of these records that belong to a forgotten name.

    arrived: exchange id -> record and the session that it was placed in.
    """
    if not arrived:
        return set()
    names = {one: list(_forgotten_names(*found)) for one, found in arrived.items()}
    digests = {digest for digested in names.values() for digest in digested}
    rows = session.execute(
        select(ForgottenRow.digest, ForgottenRow.until).where(
            ForgottenRow.kind.in_(("user", "session", "session_key", "exchange")),
            ForgottenRow.digest.in_(sorted(digests)),
        )
    )
    until: dict[str, float | None] = {row.digest: row.until for row in rows}
    return {
        one
        for one, digested in names.items()
        for digest in digested
        if digest in until and _is_until(arrived[one][0].timings.started_at, until[digest])
    }


def forgotten_feedback(session: Session, records: Collection[Feedback]) -> set[str]:
    """Return the ids of feedback about what was forgotten, or that a forgotten user sent."""
    if not records or not any_forgotten(session):
        return set()
    digests = {
        one.feedback_id: [
            *(name_digest(kind, one.target) for kind in ("exchange", "session", "told")),
            name_digest("source", one.source),
        ]
        for one in records
    }
    rows = session.execute(
        select(ForgottenRow.digest, ForgottenRow.until).where(
            ForgottenRow.kind.in_(("exchange", "session", "told", "source")),
            ForgottenRow.digest.in_(sorted({one for names in digests.values() for one in names})),
        )
    )
    until: dict[str, float | None] = {row.digest: row.until for row in rows}
    return {
        one.feedback_id
        for one in records
        for digest in digests[one.feedback_id]
        if digest in until and _is_until(one.received_at, until[digest])
    }


def _forgotten_names(exchange: Exchange, session_id: str) -> Iterator[str]:
    named = (
        ("user", exchange.user),
        ("session", session_id),
        ("session_key", exchange.session_key),
        ("exchange", exchange.exchange_id),
        # What a task began with is repeated in each of its rehearsals.
        ("exchange", exchange.task if exchange.origin == "rehearsal" else ""),
    )
    return (name_digest(kind, name) for kind, name in named if name)


def _is_until(at: float, until: float | None) -> bool:
    return until is None or at <= until
