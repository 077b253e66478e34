"""Lists of exchanges and scored groups for people, days of budgets, and patient transactions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TypeVar

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from ingest.errors import UnreadableExchangesError
from ingest.records import ScoredGroup
from ingest.store.exchanges import StoredExchange, load_by_seq
from ingest.store.groups import load_scored_group
from ingest.store.sessions import stored_name
from sidecar.backoff import Backoff
from sidecar.errors import StoreError
from sidecar.store.database import DAMAGE, Database
from sidecar.store.models import ExchangeRow, GroupRow

PAGE = 64
"""Exchanges that are in memory at once: their bodies may have 32 MB each, and mostly have 10 kB."""
WINDOW = 5_000
"""Rows that one read transaction looks through for those that are wanted: a long one would keep an
SQLite file from shrinking, and PostgreSQL from cleaning up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which exchanges are listed; None: any."""

    session: str | None = None
    """As `ingest.store.sessions.stored_name` takes it."""
    user: str | None = None
    project: str | None = None
    adapter: str | None = None
    held_out: bool | None = None
    since: float | None = None
    """Unix seconds; by the time at which an exchange was stored, a group scored."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A damaged record, left out of the listing."""

    name: str
    why: str


def newest_exchanges(
    database: Database, wanted: Wanted, *, limit: int | None = None
) -> Iterator[StoredExchange | Unreadable]:
    """Yield exchanges, the newest first. Each page is a read transaction of its own."""
    wanted = _as_stored(database, wanted)
    before: int | None = None
    left = limit
    while left is None or left > 0:
        with database.read() as session:
            window = _window(session, wanted, before)
            if window is None:
                return
            size = PAGE if left is None else min(PAGE, left)
            seqs = _seqs(session, wanted, window, size)
            found, damage = _load(session, seqs)
        yield from reversed(found)
        yield from damage
        before = seqs[-1] if len(seqs) == size else window.start
        left = None if left is None else left - len(seqs)


def newest_scored_groups(
    database: Database, wanted: Wanted, *, limit: int | None = None
) -> Iterator[ScoredGroup | Unreadable]:
    """Yield groups with scores, the newest first. Groups are never held out."""
    wanted = _as_stored(database, wanted)
    before: int | None = None
    left = limit
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        with database.read() as session:
            statement = select(GroupRow.seq, GroupRow.group_id).where(*_group_filters(wanted))
            if before is not None:
                statement = statement.where(GroupRow.seq < before)
            rows = session.execute(statement.order_by(GroupRow.seq.desc()).limit(size)).all()
        for _, group_id in rows:
            with database.read() as session:
                try:
                    scored = load_scored_group(session, group_id)
                except DAMAGE as error:
                    yield Unreadable(f"group {group_id}", str(error))
                    continue
            if scored is not None:
                yield scored
        if not rows:
            return
        before = rows[-1].seq
        left = None if left is None else left - len(rows)


def _as_stored(database: Database, wanted: Wanted) -> Wanted:
    if wanted.session is None:
        return wanted
    with database.read() as session:
        return replace(wanted, session=stored_name(session, wanted.session))


def _window(session: Session, wanted: Wanted, before: int | None) -> range | None:
    """The next rows to look through, by `seq`; None when there are no older ones.

    A session's rows are found by an index, so all of them are one window.
    """
    statement = select(func.max(ExchangeRow.seq))
    if before is not None:
        statement = statement.where(ExchangeRow.seq < before)
    newest = session.scalar(statement)
    if newest is None:
        return None
    oldest = 0 if wanted.session is not None else max(0, newest + 1 - WINDOW)
    return range(oldest, newest + 1)


def _seqs(session: Session, wanted: Wanted, window: range, limit: int) -> list[int]:
    columns: Mapping[str, ColumnElement[bool] | None] = {
        "session": ExchangeRow.session_id == wanted.session,
        "user": ExchangeRow.user == wanted.user,
        "project": ExchangeRow.project == wanted.project,
        "adapter": ExchangeRow.adapter == wanted.adapter,
        "held_out": ExchangeRow.held_out == wanted.held_out,
        "since": ExchangeRow.stored_at >= wanted.since if wanted.since is not None else None,
    }
    given = [
        rule
        for name, rule in columns.items()
        if rule is not None and getattr(wanted, name) is not None
    ]
    given += [ExchangeRow.seq >= window.start, ExchangeRow.seq < window.stop]
    statement = select(ExchangeRow.seq).where(*given).order_by(ExchangeRow.seq.desc())
    return list(session.scalars(statement.limit(limit)))


def _group_filters(wanted: Wanted) -> list[ColumnElement[bool]]:
    given: list[ColumnElement[bool]] = [GroupRow.scored_at.is_not(None)]
    if wanted.session is not None:
        given.append(GroupRow.session_id == wanted.session)
    if wanted.adapter is not None:
        given.append(GroupRow.adapter == wanted.adapter)
    if wanted.since is not None:
        given.append(GroupRow.scored_at >= wanted.since)
    return given


def _load(session: Session, seqs: list[int]) -> tuple[list[StoredExchange], list[Unreadable]]:
    try:
        return load_by_seq(session, seqs), []
    except UnreadableExchangesError as error:
        sound = [seq for seq in seqs if seq not in error.damage]
        columns = select(ExchangeRow.seq, ExchangeRow.exchange_id)
        named = session.execute(columns.where(ExchangeRow.seq.in_(error.damage))).all()
        damaged = [Unreadable(f"exchange {name}", error.damage[seq]) for seq, name in named]
        return load_by_seq(session, sound), damaged


# The days of budgets, in UTC, and the counter rows in which they are kept. Pure.


def day_of(now: float) -> str:
    """Return the UTC day of a time in Unix seconds, such as 2026-11-21."""
    return _utc(now).date().isoformat()


def next_midnight(now: float) -> datetime:
    """Return when the budgets of a day are renewed: the next midnight UTC."""
    return _utc(now).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)


def _utc(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)


# Repeat a transaction while the store is locked or away, since what it stores has cost money.

PAUSES = Backoff(first_s=1.0, last_s=5.0)

Result = TypeVar("Result")


async def patiently(
    work: Callable[[], Result],
    *,
    on_failure: Callable[[StoreError, float], None],
    longest_s: float = math.inf,
) -> Result:
    """Run a store operation in a thread; again, after growing pauses, while the store refuses.

    on_failure: is told each error that is followed by another attempt, and the pause in seconds.
    Raises: StoreError when the store still refuses after `longest_s` seconds.
    """
    give_up_at = monotonic() + longest_s
    failures = 0
    while True:
        try:
            return await asyncio.to_thread(work)
        except StoreError as error:
            failures += 1
            pause_s = PAUSES.wait_s(failures)
            if monotonic() + pause_s > give_up_at:
                raise
            on_failure(error, pause_s)
            await asyncio.sleep(pause_s)
