"""A lease in the store: of several processes of control one acts, the others wait.

The holder lets the row's `beat` grow every BEAT_S. One that waits watches it, and takes the lease
when it has not grown for LEASE_S of its own monotonic clock: no two machines' clocks are compared.
A holder that could not beat for HELD_S stops acting before another one begins (HELD_S < LEASE_S).
A clean stop gives the lease back, and the next one takes it at once. So does a process that was
killed and starts again: it has the id of its `state_dir`, which a lock of the kernel gives to one
process at a time (`sidecar.processes.state_lock`).
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from sidecar.store.database import Database, count
from sidecar.store.models import LeaseRow

log = structlog.get_logger()

CONTROL = "control"
BEAT_S = 1.5
HELD_S = 4.0
LEASE_S = 5.0
ID_FILE = "control-id"


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
        self._seen: tuple[tuple[str, int], float] | None = None
        """The other holder's beat, and when it was first seen."""
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
            if self.acts:
                await work()

        return turn

    def beat(self) -> bool:
        """Keep the lease, or take it when its holder is gone. Returns: `acts`. Raises: StoreError.

        It reads first: a process that waits writes nothing.
        """
        asked_at = self._monotonic()
        with self._database.read() as session:
            row = session.get(LeaseRow, CONTROL)
            found = None if row is None else (row.holder, row.beat, row.told)
        if found is not None and not self._may_take(found[:2], asked_at):
            if self._beaten_at is not None:
                log.error("control_lost_its_lease", to=found[2])
            self._beaten_at, self.other = None, found[2]
            return False
        taken = self._beaten_at is None
        if not self._write(found[:2] if found is not None else None, taken):
            return False  # another one was faster; the next beat sees it
        self._beaten_at, self._seen, self.other = asked_at, None, ""
        if taken:
            log.info("control_acts", holder=self._holder[:8], after=found[2] if found else "")
        return self.acts

    def give_back(self) -> None:
        """Let another one act at once. Raises: StoreError."""
        with self._database.write() as session:
            row = session.get(LeaseRow, CONTROL)
            if row is not None and row.holder == self._holder:
                row.holder = ""
        self._beaten_at = None

    def _may_take(self, found: tuple[str, int], now: float) -> bool:
        if found[0] in ("", self._holder):
            return True
        if self._seen is None or self._seen[0] != found:
            if self._seen is None:
                log.info("control_waits", holder=found[0][:8])
            self._seen = (found, now)
        return now - self._seen[1] >= LEASE_S

    def _write(self, found: tuple[str, int] | None, taken: bool) -> bool:
        with self._database.write() as session:
            row = session.get(LeaseRow, CONTROL)
            if (None if row is None else (row.holder, row.beat)) != found:
                return False
            if row is None:
                row = LeaseRow(name=CONTROL, beat=0)
                session.add(row)
            row.holder, row.beat = self._holder, row.beat + 1
            if taken:
                row.taken_at = self._clock()
                row.told = f"{socket.gethostname()}, pid {os.getpid()}"[:255]
                count(session, "control", "lease_taken")
        return True
