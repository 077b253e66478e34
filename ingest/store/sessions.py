"""Read the exchanges that the session tree remembers, store where they stand, and count groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from ingest.sessions.records import Place
from ingest.store.exchanges import StoredExchange
from ingest.store.pages import decoded_columns, decoded_sizes, pages_of, read_pages
from ingest.store.places import place_columns
from sidecar.routing.session_key import header_name, session_key
from sidecar.store.models import ExchangeRow, FeedbackRow, GroupRow, SignalRow
from sidecar.store.models.capture import NAMED_OTHERWISE


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
        # A damaged time keeps no older exchange from being read.
        if isinstance(stored_at, float) and stored_at < since:
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
