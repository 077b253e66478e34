"""Take a failing canary out at once, in every worker, without capture, ingest, store or control.

Each worker counts the replies of both arms in its own row of memory that all workers share, and
tests the sum of all rows after every canary reply (`breaker_rule.py`). The worker that finds
the canary too bad writes the canary's tag into the shared first cell; every worker reads that cell
before it assigns a request, so the next request of each goes to the champion.

The canary stays out as long as the routing table names it with the same salt. Control ends it, or
a person resumes it, which gives it a new salt (`deploy.registry.transitions`).

After its first bad reply only each `FADE`th reply of a session counts, good or bad, in either arm.
So one client that cuts every reply, or whose prompts never get an answer, does not condemn an
adapter that serves everybody else; and where all users share one session, they still count.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Final

import structlog
from xxhash import xxh3_64_intdigest

from sidecar.metrics.proxy import Metrics
from sidecar.records import Arm
from sidecar.routing.breaker_rule import KINDS, REPLIES, TALLY, Excess, ExcessTest
from sidecar.routing.table import RoutingTable

log = structlog.get_logger()
ERROR, CUT, EMPTY, SHORT, SLOW = (1 << kind for kind in range(len(KINDS)))
"""Bits of what was wrong with a reply, in the order of `KINDS`."""
NO_CANARY: Final = 0.0
"""Tag while the routing table has no canary."""
FADE = 4
"""A session that had a bad reply needs three fifths of the canary's replies to end it alone: each
bad reply that counts adds 1.7 nats, each good one of others takes 0.7. Users who all share one
session end it with 1 + 7 * 4 = 29 bad replies; with 53 if the champion answered nobody yet."""
SESSIONS = 16_384
"""Places for sessions that had a bad reply, by hash: 128 kB that all workers share. Two sessions in
one place count as one, which costs some replies, and nothing else."""
ROW = 1 + 2 * TALLY
"""Floats of one row: the tag that the counts belong to, the canary's tally, the champion's."""


def canary_tag(table: RoutingTable) -> float:
    """A number that names the canary of a table: the same for the same adapter and salt, in every
    process. 48 bits, so that a float holds it exactly."""
    if table.canary is None:
        return NO_CANARY
    named = f"{table.canary}\x00{table.salt}".encode()
    return float(int.from_bytes(sha256(named).digest()[:6]) + 1)


def memory_bytes(rows: int) -> int:
    """What the breaker of so many workers takes: the tag of the canary that is out, the workers'
    rows, the sessions."""
    return 8 * (1 + rows * ROW + SESSIONS)


class Breaker:
    """One worker's end. All methods but `open` and `is_out` belong to the relay's thread."""

    def __init__(
        self,
        metrics: Metrics,
        memory: memoryview | None = None,
        row: int = 0,
        rows: int = 1,
        on_trip: Callable[[RoutingTable, str], None] = lambda table, reason: None,
    ) -> None:
        """memory: bytes that all workers share, all zero at first; None: this worker is alone.
        row, rows: which of how many rows this worker writes, from 0.
        on_trip: told of the table and the reason when this worker takes a canary out."""
        if memory is None:
            memory = memoryview(bytearray(memory_bytes(rows)))
        self._cells: memoryview[float] = memory[: memory_bytes(rows)].cast("d")
        self._row = 1 + row * ROW
        self._sessions = 1 + rows * ROW
        self._rows = range(1, self._sessions, ROW)
        self._on_trip = on_trip
        self._metrics = metrics
        self._table: RoutingTable | None = None
        self._tag = NO_CANARY
        self._test = ExcessTest()

    def follow(self, table: RoutingTable) -> None:
        """Obey a new routing table: a canary that was not there before starts with no counts."""
        tag = canary_tag(table)
        self._table = table
        if tag == self._tag:
            return
        self._tag = tag
        self._test = ExcessTest()
        cells, row = self._cells, self._row
        if cells[row] != tag:  # else a worker that died before has counted here: go on
            cells[row] = NO_CANARY
            for cell in range(row + 1, row + ROW):
                cells[cell] = 0.0
            cells[row] = tag

    @property
    def is_open(self) -> bool:
        """The canary of the table that is followed is out."""
        return self._tag != NO_CANARY and self._cells[0] == self._tag

    def is_out(self, table: RoutingTable) -> bool:
        """The canary of this table is out. From any thread."""
        return table.canary is not None and self._cells[0] == canary_tag(table)

    def open(self, table: RoutingTable) -> None:
        """Take out the canary of this table. From any thread."""
        self._cells[0] = canary_tag(table)

    def recall(self, table: RoutingTable) -> None:
        """Take out the canary of this table, unless a canary is out already. Before `follow`."""
        if self._cells[0] == NO_CANARY:
            self.open(table)

    def reply(self, tag: float, arm: Arm, session: str, bad: int, *, counted: bool = False) -> None:
        """Count a reply. tag: the canary's when the request was assigned; the replies of another
        canary are left out. bad: bits of what was wrong; 0 when nothing was. counted: the reply
        itself was counted before, and only `bad` is new."""
        if tag != self._tag or tag == NO_CANARY:
            return
        if not self._counts(session, bad=bool(bad)):
            return
        cells = self._cells
        at = self._row + 1 + (0 if arm == "canary" else TALLY)
        if not counted:
            cells[at + REPLIES] += 1.0
        if bad:
            for kind in range(len(KINDS)):
                if bad >> kind & 1:
                    cells[at + 1 + kind] += 1.0
                    self._metrics.bad_replies.inc((arm, KINDS[kind]))
        if arm == "canary" and not self.is_open:
            excess = self._test.look(*self._totals())
            if excess is not None:
                self._trip(excess)

    def _counts(self, session: str, *, bad: bool) -> bool:
        """Whether this reply of a session counts; see `FADE`. Workers may write one place at once:
        then a reply more or less counts."""
        place = self._sessions + xxh3_64_intdigest(session.encode("utf-8", "replace")) % SESSIONS
        # The canary's tag and the replies since the first bad one, modulo FADE, in one number.
        tag, since = divmod(self._cells[place], FADE)
        if tag != self._tag:
            if bad:
                self._cells[place] = self._tag * FADE
            return True
        since = (since + 1.0) % FADE
        self._cells[place] = self._tag * FADE + since
        return since == 0.0

    def _totals(self) -> tuple[list[float], list[float]]:
        """Both arms' tallies, the canary's first, summed over the workers that follow the same
        canary."""
        cells, tag = self._cells, self._tag
        total = [0.0] * (2 * TALLY)
        for row in self._rows:
            if cells[row] == tag:
                for at, value in enumerate(cells[row + 1 : row + ROW]):
                    total[at] += value
        return total[:TALLY], total[TALLY:]

    def _trip(self, excess: Excess) -> None:
        table = self._table
        assert table is not None, "a canary is followed"
        self.open(table)
        self._metrics.breaker_open.set(1.0)
        self._metrics.breaker_trips.inc((excess.kind,))
        log.error("canary_taken_out", canary=table.canary, reason=excess.reason)
        self._on_trip(table, excess.reason)
