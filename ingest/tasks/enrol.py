"""Follow the store: give new sessions their task key, and see when sessions are over.

Three passes go through the store by marks that survive restarts: exchanges as they are stored,
exchanges that were stored `IDLE_S` ago, and feedback. Each page is one short transaction, and
what it draws is in it; a page that fails is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.errors import UnreadableExchangesError
from ingest.store.exchanges import load_exchange
from ingest.tasks.grouping import OF_THE_JUDGE, STAGE, close, correct, draw_groups
from ingest.tasks.keys import IDLE_S, FirstExchange, TaskKey, caller_of, task_key
from sidecar.errors import UNREADABLE_JSON
from sidecar.settings.learning import Tasks
from sidecar.store.contents import keyring_of
from sidecar.store.database import Database, count, get_flag, insert_into, set_flag
from sidecar.store.models import ExchangeRow, FeedbackRow, TaskMemberRow

SEEN, IDLE, TOLD = "tasks_seen", "tasks_idle", "tasks_told"
"""Flag rows: the exchange up to which sessions are enrolled; up to which they were looked at
`IDLE_S` later; and the feedback that was looked at."""
PAGE: Final = 50
"""Rows of a page: with what they close and draw, some ten milliseconds under the write lock."""
PAGES: Final = 20
"""Pages of each pass in one step."""
SETTLE_S: Final = 1.0
"""Feedback is looked at so long after it was stored: exchanges that began before it may come from
another proxy a moment later."""
BEFORE: Final = 20_000
"""Exchanges that are looked at when whole tasks are turned on, the newest: older sessions belong to
other adapters."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """A session that has no row yet."""

    session_id: str
    exchange_id: str
    """Its first answered chat."""
    key: TaskKey
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Pass:
    """One way through the store: a flag row, the numbers that it holds, what reads a page behind
    one, and how old a row is when it is looked at."""

    mark: str
    of: Any
    read: Callable[[Session, int], Sequence[Any]]
    age_s: float


def follow(database: Database, settings: Tasks, *, now: float) -> int:
    """Do up to `PAGES` pages of each pass. Returns: the number of groups drawn."""
    drawn = 0
    for one in (
        _Pass(SEEN, ExchangeRow.seq, _exchanges, 0.0),
        _Pass(TOLD, FeedbackRow.seq, _feedback, SETTLE_S),
        _Pass(IDLE, ExchangeRow.seq, _exchanges, IDLE_S),
    ):
        for _ in range(PAGES):
            size, made = _look(database, settings, one, now)
            drawn += made
            if size < PAGE:
                break
    return drawn


def _look(database: Database, settings: Tasks, one: _Pass, now: float) -> tuple[int, int]:
    """Look at a page of a pass. Returns: its rows, and the number of groups drawn."""
    newcomers: list[_Newcomer] = []
    with database.read() as session:
        page: list[Any] = []
        for row in one.read(session, _mark(session, one.mark, one.of)):
            # A time to come was written by a clock that was fast: nothing waits for it.
            if now - one.age_s < row.stored_at <= now:
                break
            page.append(row)
        if one.mark == SEEN:
            newcomers = _newcomers(session, page, settings)
    if not page:
        return 0, 0
    names = {row.session_id for row in page if row.session_id is not None}
    with database.write() as session:
        if one.mark == SEEN:
            _enrol(session, newcomers)
            _go_on(session, page, names)
            count(session, STAGE, "seen", len(page))
            names = _told_among(session, names)
        if one.mark == TOLD:
            correct(session, names, now=now)
        pools = close(session, names, settings, now=now)
        made = sum(
            draw_groups(session, pool, settings, now=now)
            for pool in sorted(pools, key=lambda pool: (pool.key, pool.adapter))
        )
        set_flag(session, one.mark, str(page[-1].seq), now=now)
    return len(page), made


def _mark(session: Session, name: str, seq: Any) -> int:
    found = get_flag(session, name)
    if found is not None and found.isdecimal():
        return int(found)
    return max(0, (session.scalar(select(func.max(seq))) or 0) - BEFORE)


def _exchanges(session: Session, after: int) -> Sequence[Any]:
    row = ExchangeRow
    return session.execute(
        select(
            row.seq,
            row.exchange_id,
            row.session_id,
            row.started_at,
            row.stored_at,
            row.parent_id,
            row.task,
            row.origin,
        )
        .where(row.seq > after)
        .order_by(row.seq)
        .limit(PAGE)
    ).all()


def _feedback(session: Session, after: int) -> Sequence[Any]:
    row = FeedbackRow
    return session.execute(
        select(row.seq, row.stored_at, row.session_id)
        .where(row.seq > after)
        .order_by(row.seq)
        .limit(PAGE)
    ).all()


def _told_among(session: Session, names: set[str]) -> set[str]:
    """Return those of these sessions whose outcome was told."""
    row = FeedbackRow
    told = select(row.session_id).where(row.session_id.in_(sorted(names)), row.kind == "outcome")
    return {one for one in session.scalars(told.distinct()) if one is not None}


def _newcomers(session: Session, page: Sequence[Any], settings: Tasks) -> list[_Newcomer]:
    """Find the sessions of a page that have no row yet, and their keys."""
    may_be = {
        one.session_id
        for one in page
        if one.task or one.origin != "user" or settings.key != "header"
    }
    known = select(TaskMemberRow.session_id).where(TaskMemberRow.session_id.in_(sorted(may_be)))
    found = []
    for name in sorted(may_be - set(session.scalars(known))):
        first = _first(session, name)
        if first is None:
            continue
        key = task_key(_read(session, first, settings), weakest=settings.key)
        if key is None or (settings.learn == "ruler" and key.kind not in OF_THE_JUDGE):
            continue
        values = {
            "project": first.project,
            "adapter": first.adapter,
            "caller": caller_of(first.user, first.key_id, first.address_hash),
            "began_at": first.started_at,
        }
        found.append(_Newcomer(name, first.exchange_id, key, values))
    return found


def _first(session: Session, session_id: str) -> Any:  # Any: a row
    """Return the first answered chat of a session; None when there is none."""
    row = ExchangeRow
    found = session.execute(
        select(
            row.seq,
            row.exchange_id,
            row.started_at,
            row.project,
            row.task,
            row.origin,
            row.prompt_key,
            row.adapter,
            row.user,
            row.key_id,
            row.address_hash,
        )
        .where(
            row.session_id == session_id,
            row.surface == "chat",
            row.outcome == "ok",
            row.status == 200,
        )
        .limit(PAGE)
    ).all()
    return min(found, key=lambda one: (one.started_at, one.seq), default=None)


def _read(session: Session, first: Any, settings: Tasks) -> FirstExchange:
    """Read what the key of a session is made of, as far as it is needed."""
    request: Mapping[str, Any] | None = None
    repeats = False
    by_content = not first.task and first.origin == "user" and not keyring_of(session)
    # With a key for encryption nothing of a prompt is kept by which a guess of it could be tested.
    if by_content and settings.key == "template":
        if first.prompt_key is not None:
            alike = select(ExchangeRow.seq).where(ExchangeRow.prompt_key == first.prompt_key)
            repeats = len(session.scalars(alike.limit(settings.size)).all()) >= settings.size
        request = None if repeats else _request(session, first.exchange_id)
    return FirstExchange(
        project=first.project,
        task=first.task,
        origin=first.origin,
        prompt_key=first.prompt_key if by_content else None,
        request=request,
        repeats=repeats,
    )


def _request(session: Session, exchange_id: str) -> Mapping[str, Any] | None:
    try:
        stored = load_exchange(session, exchange_id)
        if stored is None:
            return None
        return msgspec.json.decode(stored.exchange.request, type=dict[str, Any])
    except (*UNREADABLE_JSON, UnreadableExchangesError) as error:
        log.warning("task_request_unreadable", exchange_id=exchange_id, why=str(error))
        return None


def _enrol(session: Session, newcomers: Sequence[_Newcomer]) -> None:
    """Store the rows of new sessions, as far as they are still in the store."""
    names = [one.exchange_id for one in newcomers]
    there = dict(
        session.execute(
            select(ExchangeRow.exchange_id, ExchangeRow.session_id).where(
                ExchangeRow.exchange_id.in_(names)
            )
        ).all()
    )
    for one in newcomers:
        if there.get(one.exchange_id) != one.session_id:
            continue
        values = {"key_kind": one.key.kind, "key": one.key.digest, **one.values}
        statement = insert_into(session, TaskMemberRow).values(session_id=one.session_id, **values)
        row = statement.on_conflict_do_nothing().returning(TaskMemberRow.session_id)
        if session.scalar(row) is not None:
            count(session, STAGE, f"enrolled_{one.key.kind}")


def _go_on(session: Session, page: Sequence[Any], names: set[str]) -> None:
    """Reopen sessions that were over, and have a turn that began later; once each. Later turns, and
    those of a session that is in a group, are counted and do not count."""
    row = TaskMemberRow
    over = session.scalars(
        select(row).where(row.session_id.in_(sorted(names)), row.over_at.is_not(None))
    )
    members = {one.session_id: one for one in over}
    for exchange in page:
        member = members.get(exchange.session_id)
        if member is None or member.over_at is None or exchange.started_at <= member.over_at:
            continue
        if member.group_id is None and member.excluded is None and not member.reopened:
            member.over_at, member.reopened = None, True
            count(session, STAGE, "reopened")
        else:
            count(session, STAGE, "late_turns")
    session.flush()
