"""Leases in the store: which process of control acts, and until when each adapter is needed.

The holder lets the row's `beat` grow every BEAT_S. One that waits watches it, and takes the lease
when it has not grown for LEASE_S of its own monotonic clock: no two machines' clocks are compared.
A holder that could not beat for HELD_S stops acting before another one begins (HELD_S < LEASE_S).
A clean stop gives the lease back, and the next one takes it at once. So does a process that was
killed and starts again: it has the id of its `state_dir`, which a lock of the kernel gives to one
process at a time (`sidecar.processes`). A copy of that folder on another machine has the
id too: the holder that finds a beat under its own id that it did not write gives way.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import structlog
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from deploy.errors import LostLeaseError
from sidecar.store.database import Database, count
from sidecar.store.models import LeaseRow, RoutingRow, TableTakenRow, UnwantedAdapterRow

# Which lines of adapters some proxy still follows an older routing table of.


def lines_behind(session: Session) -> frozenset[str]:
    """Return the names of the lines of which a proxy told an older table than the present one."""
    behind = (
        select(TableTakenRow.model)
        .join(RoutingRow, RoutingRow.model == TableTakenRow.model)
        .where(TableTakenRow.generation < RoutingRow.generation)
    )
    return frozenset(session.scalars(behind))


log = structlog.get_logger()

CONTROL = "control"
BEAT_S = 1.5
HELD_S = 4.0
LEASE_S = 5.0
ID_FILE = "control-id"
MOST_BEATS = 2**31 - 1
"""Largest beat that every store holds: a century of them."""

Found = tuple[str, int]
"""Holder and beat as they stand in the row."""


def own_id(state_dir: Path) -> str:
    """Return the id of this `state_dir`, made at the first start. Raises: OSError."""
    path = state_dir / ID_FILE
    try:
        known = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    if len(known) == 32 and known.isalnum():
        return known
    made = uuid.uuid4().hex
    path.write_text(f"{made}\n", encoding="ascii")
    return made


class Lease:
    """One process's share in the lease. `beat` runs every BEAT_S, also while it does not hold."""

    def __init__(
        self,
        database: Database,
        holder: str,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """holder: an id of its own (`own_id`). clock: Unix seconds, for people."""
        self._database = database
        self._holder = holder
        self._clock = clock
        self._monotonic = monotonic
        self._beaten_at: float | None = None
        """When this process last wrote its beat, on the monotonic clock; None: it does not hold."""
        self._seen: tuple[Found | None, float] | None = None
        """The other holder's beat, and when it was first seen. Its None: the row went."""
        self._written: set[int] = set()
        """Beats of this process that may stand in the row: the store may have kept one whose write
        failed. Empty: it never wrote any."""
        self._copied = False
        """Another process with this id was found, and logged."""
        self.other = ""
        """Who holds the lease instead, in words; empty: nobody."""

    @property
    def acts(self) -> bool:
        """True while no other process can have taken the lease."""
        held = self._beaten_at
        return held is not None and self._monotonic() - held < HELD_S

    def only_acting(self, work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
        """Return what does the work while this process acts, and else nothing."""

        async def turn() -> None:
            if not self.acts:
                return
            try:
                await work()
            except LostLeaseError as error:
                log.warning("turn_given_up", reason=str(error))

        return turn

    def beat(self) -> bool:
        """Keep the lease, or take it when its holder is gone. Returns: `acts`. Raises: StoreError.

        It reads first: a process that waits writes nothing.
        """
        asked_at = self._monotonic()
        with self._database.read() as session:
            row = session.get(LeaseRow, CONTROL)
            found = None if row is None else (row.holder, row.beat)
            told = "" if row is None else row.told
        if not self._may_take(found, told, asked_at):
            if self._beaten_at is not None:
                log.error("control_lost_its_lease", to=told)
            self._beaten_at, self.other = None, told
            return False
        taken = self._beaten_at is None
        if not self._write(found, taken):
            return False  # another one was faster; the next beat sees it
        self._beaten_at, self._seen, self.other = asked_at, None, ""
        if taken:
            log.info("control_acts", holder=self._holder[:8], after=told)
        return self.acts

    def give_back(self) -> None:
        """Let another one act at once. Raises: StoreError."""
        with self._database.write() as session:
            row = session.get(LeaseRow, CONTROL)
            if row is not None and row.holder == self._holder and self._is_own(row.beat):
                row.holder = ""
        self._beaten_at = None

    def _may_take(self, found: Found | None, told: str, now: float) -> bool:
        if found is None:
            if self._seen is None:  # nobody held it, or this process does
                return True
        elif found[0] == "":
            return True
        elif found[0] == self._holder:
            if self._is_own(found[1]):
                return True
            if not self._copied:
                self._copied = True
                log.error(
                    "control_id_used_twice",
                    by=told,
                    remedy=f"two controls have one {ID_FILE}, as after a copy of state_dir: stop "
                    "one, delete its file, start it again",
                )
        if self._seen is None or self._seen[0] != found:
            if self._seen is None:
                log.info("control_waits", holder=told)
            self._seen = (found, now)
        return now - self._seen[1] >= LEASE_S

    def _is_own(self, beat: int) -> bool:
        """Return True unless another process wrote this beat, which stands under our id. One that
        never wrote takes what an earlier process with this id left.
        """
        return not self._written or beat in self._written

    def _write(self, found: Found | None, taken: bool) -> bool:
        following = found[1] % MOST_BEATS + 1 if found else 1
        known, self._written = self._written, self._written | {following}
        with self._database.write() as session:
            row = session.get(LeaseRow, CONTROL)
            if (None if row is None else (row.holder, row.beat)) != found:
                self._written = known
                return False
            if row is None:
                row = LeaseRow(name=CONTROL)
                session.add(row)
                taken = True
            row.holder, row.beat = self._holder, following
            if taken:
                row.taken_at = self._clock()
                row.told = f"{socket.gethostname()}, pid {os.getpid()}"[:255]
                count(session, "control", "lease_taken")
        self._written = {following}
        return True


# When each loaded adapter was last needed, per vLLM.


def read_since(session: Session, replica: str) -> dict[str, float]:
    """Return adapter -> since when nothing wants it, in Unix seconds."""
    rows = session.execute(
        select(UnwantedAdapterRow.adapter, UnwantedAdapterRow.since).where(
            UnwantedAdapterRow.replica == _key(replica)
        )
    )
    return {row.adapter: row.since for row in rows}


def keep_since(
    database: Database, replica: str, unwanted: Collection[str], now: float
) -> dict[str, float]:
    """Bring the store up to date with what is loaded and unwanted now; write only a change.

    A time ahead of `now` (a clock that was set back) begins anew.
    Returns: as `read_since`. Raises: StoreError.
    """
    with database.read() as session:
        known = read_since(session, replica)
    kept = {name: known[name] for name in unwanted if name in known and known[name] <= now}
    following = {name: kept.get(name, now) for name in sorted(unwanted)}
    if following != known:
        with database.write() as session:
            of_replica = UnwantedAdapterRow.replica == _key(replica)
            session.execute(delete(UnwantedAdapterRow).where(of_replica))
            session.add_all(
                UnwantedAdapterRow(replica=_key(replica), adapter=name, since=since)
                for name, since in following.items()
            )
    return following


def _key(replica: str) -> str:
    return hashlib.sha256(replica.encode()).hexdigest()
