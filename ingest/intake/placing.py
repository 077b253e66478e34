"""The sessions of the ingest process: the tree, and what the store has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog
from sqlalchemy.orm import Session

from ingest.grouping.held_out import is_held_out
from ingest.sessions.arrival import arrival_of
from ingest.sessions.memory import RequestReader
from ingest.sessions.records import Arrival, Family, Kin, Place
from ingest.sessions.tree import TTL_S, SessionTree
from ingest.store import sessions as store
from ingest.store.exchanges import StoredExchange, sessions_of
from sidecar.records import Exchange
from sidecar.store.database import Database, count

RESTORED = 20_000
"""Exchanges that are read after a restart, at most: ten seconds. The newest count."""
RESTORED_BYTES = 512 * 2**20
"""Requests that are read after a restart, at most. The newest count."""

STAGE = "sessions"
UNREADABLE = "unreadable"
"""Counter row: damaged exchanges that a start left out; each start counts them again."""

log = structlog.get_logger()


class Sessions:
    """Places exchanges, and stores what a late one changes. For one thread."""

    def __init__(self, *, held_out_rate: float) -> None:
        """held_out_rate: share of sessions that are held out from training, 0..1."""
        self._reader = RequestReader()
        self._tree = SessionTree(is_held_out=lambda name: is_held_out(name, held_out_rate))
        self._moves: dict[str, Place] = {}
        """Exchanges that moved, until the store has it."""

    def restore(self, database: Database, *, now: float) -> int:
        """Remember the newest exchanges of the store. Damaged ones are left out and counted.

        Returns: how many are remembered.
        """
        found = damaged = 0
        with database.read() as session:
            for page, unreadable in store.newest_exchanges(
                session, since=now - TTL_S, limit=RESTORED, limit_bytes=RESTORED_BYTES
            ):
                for one in page:
                    # A clock that was fast for a while must not keep an exchange for ever.
                    stored_at = min(one.stored_at, now)
                    arrival = arrival_of(one.exchange, self._reader)
                    self._tree.restore(arrival, one.place, now=stored_at)
                found += len(page)
                damaged += unreadable
        if damaged:
            with database.write() as session:
                count(session, STAGE, UNREADABLE, damaged)
        if found or damaged:
            log.info("sessions_restored", exchanges=found, unreadable=damaged)
        return found

    def read(self, exchange: Exchange) -> Arrival:
        """Read an exchange as `place` needs it."""
        return arrival_of(exchange, self._reader)

    def place(
        self, exchange: Exchange, *, now: float, arrival: Arrival | None = None
    ) -> tuple[Place, bool]:
        """Return the place of an exchange, and whether it is held out.

        arrival: what `read` returned, if the caller has it.
        """
        own, *moved = self._tree.place(arrival or self.read(exchange), now=now)
        for place in moved:
            self._moves[place.exchange_id] = place
        return own, own.held_out and not own.shares_opening

    @property
    def moved(self) -> bool:
        """`place` has moved exchanges, which is not stored yet."""
        return bool(self._moves)

    def kin(self, exchange_id: str) -> Kin | None:
        """Return who stands beside a placed exchange, after all moves so far; None when it is
        forgotten already."""
        return self._tree.kin(exchange_id)

    def regrouped(self) -> list[Family]:
        """Return the families that the moves of `save_moves` have changed."""
        return self._tree.regrouped() if self._moves else []

    def save_moves(self, session: Session) -> None:
        """Store the moves that `place` caused, in the caller's transaction."""
        store.save_moves(session, self._moves.values())

    def saved(self) -> None:
        """All placed exchanges are stored, or never will be, and `save_moves` after the last."""
        self._moves.clear()
        self._tree.forget_regrouped()


def as_moved(session: Session, found: Sequence[StoredExchange]) -> list[StoredExchange]:
    """Return exchanges as the store has them now: a later one of the same batch may have moved an
    earlier one to another session."""
    sessions = sessions_of(session, [stored.exchange.exchange_id for stored in found])
    return [
        replace(stored, place=replace(stored.place, session=name), held_out=held_out)
        for stored in found
        for name, held_out in (sessions[stored.exchange.exchange_id],)
    ]
