"""Delete what is too old or too much, a little at a time, from the loop of ingest.

A pass goes through the kinds of records. Each step of it reads a page, or is one transaction that
deletes a bounded number of rows and bytes, so the write lock is held for milliseconds, and ingest
goes on between two steps.

By age a pass goes on where the one before stopped, and looks at every row: a clock that was wrong
for a while costs the rows that it marked, not those behind them. It stops after `PAGES` pages in
which nothing was too old, so a minute's work does not grow with the store. The places are kept in
memory alone: after a restart the first pass begins at the oldest row and finds what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.orm import Session

from ingest.retention import deletion
from ingest.retention.deletion import (
    OF_A_COMPARISON,
    STAGE,
    Deleted,
    Held,
    dead_letters_after,
    deletion_steps,
    divide,
    feedback_after,
    held_after,
    judge_calls_after,
    rehearsals_of,
    too_much,
    too_old,
)
from sidecar.forwarding.sender import DEAD_LETTERS_DAYS
from sidecar.settings import Retention
from sidecar.store.database import Database, count, get_flag, set_flag
from sidecar.store.disk import give_back, space_of
from sidecar.store.models import (
    DeadLetterRow,
    ExchangeRow,
    FeedbackRow,
    JudgeCallRow,
    JudgeReplyRow,
    RunRow,
    RunStepRow,
)
from sidecar.store.traces import mark_replaced

FLAG = "retention"
RUNS_DAYS = 365.0
"""Days that training runs which made no adapter stay."""
INTERVAL_S = 60.0
"""Seconds between two passes."""
DAY_S = 86_400.0
PAGES = 50
"""Pages of a table that a pass looks at when it finds nothing to delete: 10,000 rows. So of a
million exchanges each is looked at within two hours."""
ROWS = 50
BYTES = 2**20
"""Exchanges, and stored bytes, that one transaction deletes; a larger exchange goes alone."""
KEPT_FREE_BYTES = 64 * 2**20
"""Free pages that SQLite's file keeps for the next records."""

Row = TypeVar("Row", bound=Any)  # Any: a row of a query, with `seq`

log = structlog.get_logger()


class RetentionState(msgspec.Struct, frozen=True, kw_only=True):
    """What the last pass found, for status and metrics."""

    at: float
    """Unix seconds."""
    used_bytes: int
    free_bytes: int
    max_bytes: int
    """0: no limit."""
    oldest_at: float | None
    """When the oldest exchange was stored; None: there is none."""


def read_state(session: Session) -> RetentionState | None:
    """Return what ingest last wrote; None when it wrote nothing, or the row is damaged."""
    found = get_flag(session, FLAG)
    try:
        return None if found is None else msgspec.json.decode(found, type=RetentionState)
    except msgspec.MsgspecError:
        log.warning("retention_state_unreadable")
        return None


class Sweeper:
    """Deletes by the settings `[retention]`. For one thread."""

    def __init__(self, database: Database, settings: Retention) -> None:
        self._database = database
        self._settings = settings
        ages = (settings.exchanges_days, settings.groups_days)
        self._exchanges_s, self._groups_s = (days * DAY_S if days else None for days in ages)
        """None: they stay for good."""
        self._pass: Iterator[int] | None = None
        self._began = float("-inf")
        self._deleted = 0
        self._locked = 0
        self._places: dict[str, int] = {}
        """Kind of record -> the row up to which it was looked at."""

    def step(self, now: float) -> bool:
        """Do one step of a pass, if one is under way or due.

        Returns: True when more is to be done now. Raises: StoreError; the next pass begins anew.
        """
        if self._pass is None:
            if self._began <= now < self._began + INTERVAL_S:
                return False  # a clock that was ahead, and is right again, does not put it off
            self._began = now
            self._pass = self._steps(now)
            self._deleted = self._locked = 0  # an error may have ended the pass before
        under_way, self._pass = self._pass, None
        for deleted in under_way:
            self._deleted += deleted
            self._pass = under_way
            return True
        if self._deleted:
            log.info("retention_deleted", rows=self._deleted)
        if self._locked:
            log.warning(
                "retention_holds_back",
                exchanges=self._locked,
                reason="younger ones are stored as a difference from them, encrypted with a key "
                "that is missing; add it to store.encryption_key_file",
            )
        self._deleted = self._locked = 0
        return False

    def _steps(self, now: float) -> Iterator[int]:
        """Yield after each page and each transaction: the number of rows that were deleted."""
        yield from self._old_exchanges(now)
        yield from self._exchanges_over_the_limit(now)
        yield from self._judge_calls(now)
        yield from self._judge_replies(now)
        yield from self._feedback(now)
        yield from self._dead_letters(now)
        yield from self._runs(now)
        yield from self._space()
        self._report(now)

    def _round(
        self,
        kind: str,
        read: Callable[[Session, int], Sequence[Row]],
        delete: Callable[[Sequence[Row]], Iterator[int]],
    ) -> Iterator[int]:
        """Go on through a table, in the order of `seq`, and begin again at its end.

        read: returns up to `PAGE` rows after a place. delete: deletes what is too old of them.
        Ends at the end of the table, or after `PAGES` pages of which nothing was deleted.
        """
        left = PAGES
        while left:
            with self._database.read() as session:
                rows = read(session, self._places.get(kind, 0))
            deleted = self._deleted
            yield from delete(rows)
            self._places[kind] = rows[-1].seq if len(rows) == deletion.PAGE else 0
            if len(rows) < deletion.PAGE:
                return
            left = left - 1 if self._deleted == deleted else PAGES
            yield 0

    def _old_exchanges(self, now: float) -> Iterator[int]:
        ages = {"exchanges_s": self._exchanges_s, "groups_s": self._groups_s}
        if not any(ages.values()):
            return

        def remove(held: Sequence[Held]) -> Iterator[int]:
            yield from self._delete_exchanges(too_old(held, **ages, now=now), now)

        yield from self._round("exchanges", held_after, remove)

    def _exchanges_over_the_limit(self, now: float) -> Iterator[int]:
        """Delete the oldest, whatever their age."""
        excess, cursor = self._excess(), 0
        while excess > 0:
            with self._database.read() as session:
                held = held_after(session, cursor)
            if not held:
                return
            cursor = held[-1].seq
            chosen = too_much(held, excess_bytes=excess)
            excess -= sum(one.stored_bytes for one in chosen)
            yield from self._delete_exchanges(chosen, now)
            yield 0

    def _delete_exchanges(self, chosen: Sequence[Held], now: float) -> Iterator[int]:
        sizes = [(one.exchange_id, one.stored_bytes) for one in chosen]
        for chunk in self._with_rehearsals(divide(sizes, ROWS, BYTES)):
            done = Deleted()
            for done in deletion_steps(self._database, chunk, why="expired", now=now):
                yield done.exchanges
            self._locked += len(done.locked)

    def _with_rehearsals(self, found: Iterable[list[str]]) -> Iterator[list[str]]:
        """Yield the rehearsals of tasks that begin in a chunk, in chunks, before it."""
        for chunk in found:
            with self._database.read() as session:
                rehearsed = rehearsals_of(session, chunk)
            yield from (rehearsed[at : at + ROWS] for at in range(0, len(rehearsed), ROWS))
            yield chunk

    def _excess(self) -> int:
        limit = self._settings.max_bytes
        if not limit:
            return 0
        with self._database.read() as session:
            return space_of(session, limit=limit).used - limit

    def _judge_calls(self, now: float) -> Iterator[int]:
        """Delete replies of the judge. Of the gate's the row stays: the lineage names the judge."""
        if (age_s := self._groups_s) is None:
            return

        def remove(rows: Sequence[Any]) -> Iterator[int]:
            old = [row for row in rows if row.at < now - age_s]
            gone = [row.seq for row in old if not row.group_id.startswith(OF_A_COMPARISON)]
            blank = [
                row.seq for row in old if row.group_id.startswith(OF_A_COMPARISON) and row.said
            ]
            if blank or gone:
                yield self._delete("judge_calls", JudgeCallRow, gone, blank=blank)

        yield from self._round("judge_calls", judge_calls_after, remove)

    def _delete(
        self,
        kind: str,
        row: type[JudgeCallRow | JudgeReplyRow | FeedbackRow | DeadLetterRow],
        gone: Sequence[int],
        *where: ColumnElement[bool],
        blank: Sequence[int] = (),
    ) -> int:
        """Delete rows by `seq`. blank: calls of the judge that stay without what was said."""
        with self._database.write(alone=False) as session:
            if blank:
                session.execute(
                    update(JudgeCallRow)
                    .where(JudgeCallRow.seq.in_(blank))
                    .values(reply="", error=None)
                    .execution_options(synchronize_session=False)
                )
            deleted = session.scalars(
                delete(row).where(row.seq.in_(gone), *where).returning(row.seq)
            ).all()
            count(session, STAGE, kind, len(deleted))
            mark_replaced(session)
        return len(deleted)

    def _judge_replies(self, now: float) -> Iterator[int]:
        """Delete kept replies of the judge: they hold what its calls hold."""
        if (age_s := self._groups_s) is None:
            return
        row, gone = JudgeReplyRow, deletion.PAGE
        while gone == deletion.PAGE:
            oldest = (
                select(row.seq).where(row.at < now - age_s).order_by(row.at).limit(deletion.PAGE)
            )
            with self._database.read() as session:
                seqs = session.scalars(oldest).all()
            if not seqs:
                return
            yield self._delete("judge_replies", row, seqs)
            gone = len(seqs)

    def _feedback(self, now: float) -> Iterator[int]:
        """Delete feedback whose exchange has not come."""
        if (age_s := self._exchanges_s) is None:
            return

        def remove(rows: Sequence[Any]) -> Iterator[int]:
            old = [row for row in rows if row.stored_at < now - age_s]
            if gone := [row.seq for row in old if row.exchange_id is None]:
                waits = FeedbackRow.exchange_id.is_(None)  # still
                yield self._delete("feedback", FeedbackRow, gone, waits)

        yield from self._round("feedback", feedback_after, remove)

    def _dead_letters(self, now: float) -> Iterator[int]:
        def remove(rows: Sequence[Any]) -> Iterator[int]:
            before = now - DEAD_LETTERS_DAYS * DAY_S
            old = [(row.seq, row.size or 0) for row in rows if row.at < before]
            for gone in divide(old, ROWS, BYTES):
                yield self._delete("dead_letters", DeadLetterRow, gone)

        yield from self._round("dead_letters", dead_letters_after, remove)

    def _runs(self, now: float) -> Iterator[int]:
        """Delete runs that made no adapter."""
        while True:
            with self._database.write(alone=False) as session:
                old = session.scalars(
                    select(RunRow.run_id)
                    .where(
                        RunRow.status.in_(("failed", "skipped")),
                        RunRow.ended_at < now - RUNS_DAYS * DAY_S,
                        RunRow.adapter.is_(None),
                    )
                    .limit(ROWS)
                ).all()
                session.execute(delete(RunStepRow).where(RunStepRow.run_id.in_(old)))
                session.execute(delete(RunRow).where(RunRow.run_id.in_(old)))
                count(session, STAGE, "runs", len(old))
            if not old:
                return
            yield len(old)

    def _space(self) -> Iterator[int]:
        while True:
            with self._database.read() as session:
                free = space_of(session).free if _is_sqlite(session) else 0
            if free <= KEPT_FREE_BYTES:
                return
            with self._database.write(alone=False) as session:
                if not give_back(session):
                    return
            yield 0

    def _report(self, now: float) -> None:
        with self._database.read() as session:
            space = space_of(session, limit=self._settings.max_bytes)
            oldest = session.scalar(
                select(ExchangeRow.stored_at).order_by(ExchangeRow.seq).limit(1)
            )
        state = RetentionState(
            at=now,
            used_bytes=space.used,
            free_bytes=space.free,
            max_bytes=self._settings.max_bytes,
            oldest_at=oldest,
        )
        with self._database.write(alone=False) as session:
            set_flag(session, FLAG, msgspec.json.encode(state).decode(), now=now)


def _is_sqlite(session: Session) -> bool:
    return session.get_bind().dialect.name == "sqlite"
