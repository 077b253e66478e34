"""Take a failing canary out at once in every worker, without capture, ingest, store or control.

Each worker counts the replies of both arms in its own row of shared memory, and tests the sum of
all rows after every canary reply (`ExcessTest`). The worker whose test fails writes the
canary's tag into the shared first cell. Every worker reads that cell before it assigns a request,
so the next request goes to the champion.

Each line of adapters (`sidecar.lines`) has a breaker and shared memory of its own.

The canary stays out as long as the routing table names it with the same salt. Control ends it, or a
person resumes it, which gives it a new salt (`deploy.registry.transitions`).

After the first bad reply of a session, or of a caller under whatever names of sessions, only every
`FADE`th of its replies counts, good or bad, in either arm. So one client that cuts every reply, or
whose prompts never get an answer, does not condemn an adapter that serves all others well. Errors
of vLLM count whoever the caller is: no client causes them. Where all users share one session, its
replies still count, and those of a caller with half of all replies are not thinned out. What a few
callers may have caused takes the canary out, but says nothing of the adapter (`FEW_CALLERS`).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Final

import structlog
from xxhash import xxh3_64_intdigest

from sidecar.metrics.hot import Gauge
from sidecar.metrics.proxy import Metrics
from sidecar.records import Arm
from sidecar.routing.breaker_rule import KINDS, REPLIES, TALLY, Excess, ExcessTest
from sidecar.routing.table import RoutingTable

log = structlog.get_logger()
ERROR, CUT, EMPTY, SHORT, SLOW = (1 << kind for kind in range(len(KINDS)))
"""One bit for each kind of bad reply, in the order of `KINDS`."""
NO_CANARY: Final = 0.0
"""The tag while the routing table has no canary."""
FADE = 4
"""A session with bad replies can end a canary alone only with three fifths of its replies: each bad
reply that counts adds 1.7 nats, and each good reply of others subtracts 0.7. Users who all share
one session end it with 1 + 7 * 4 = 29 bad replies, or 53 if the champion has answered nobody yet.
"""
SLOTS = 16_384
"""Slots for callers and sessions that had a bad reply, by hash: 128 kB shared by all workers. Two
in one slot count as one, which only leaves out some replies."""
ROW = 1 + 2 * TALLY + len(KINDS)
"""Floats in one row: the tag of the counts, the canary's tally, the champion's tally, and for each
kind the callers whose first bad reply it was, of the canary's."""


def canary_tag(table: RoutingTable) -> float:
    """Return a number for the canary of a table: equal for the same adapter and salt, in every
    process. It has 48 bits, so that a float holds it exactly."""
    if table.canary is None:
        return NO_CANARY
    named = f"{table.canary}\x00{table.salt}".encode()
    return float(int.from_bytes(sha256(named).digest()[:6]) + 1)


def memory_bytes(rows: int) -> int:
    """Shared memory in bytes: the tag of the canary that is out, a row for each worker, the slots,
    the tag of the canary that has filled a slot."""
    return 8 * (1 + rows * ROW + SLOTS + 1)


class Breaker:
    """The breaker in one worker. All methods except `open` and `is_out` are for the relay's
    thread."""

    def __init__(
        self,
        metrics: Metrics,
        memory: memoryview | None = None,
        row: int = 0,
        rows: int = 1,
        on_trip: Callable[[RoutingTable, str], None] = lambda table, reason: None,
        shown: Gauge | None = None,
    ) -> None:
        """memory: bytes that all workers share, initially zero; None for a single worker. row,
        rows: index of this worker's row, from 0, and number of rows. on_trip: called with the table
        and the reason when this worker takes a canary out. shown: is 1 while a canary is out; None:
        the gauge of the default line."""
        if memory is None:
            memory = memoryview(bytearray(memory_bytes(rows)))
        self._cells: memoryview[float] = memory[: memory_bytes(rows)].cast("d")
        self._row = 1 + row * ROW
        self._slots = 1 + rows * ROW
        self._filled = self._slots + SLOTS
        self._rows = range(1, self._slots, ROW)
        self._on_trip = on_trip
        self._metrics = metrics
        self._shown = metrics.breaker_open if shown is None else shown
        self._table: RoutingTable | None = None
        self._tag = NO_CANARY
        self._test = ExcessTest()
        self._replies: dict[str, int] = {}
        """Replies of this worker by caller, of the first `SLOTS` callers."""
        self._all_replies = 0

    def follow(self, table: RoutingTable) -> None:
        """Follow a new routing table. A canary that is new starts without counts."""
        tag = canary_tag(table)
        self._table = table
        if tag == self._tag:
            return
        self._tag = tag
        self._test = ExcessTest()
        self._replies, self._all_replies = {}, 0
        cells, row = self._cells, self._row
        if cells[row] != tag:  # else continue the counts of a worker that died
            cells[row] = NO_CANARY
            for cell in range(row + 1, row + ROW):
                cells[cell] = 0.0
            cells[row] = tag

    @property
    def is_open(self) -> bool:
        """True if the canary of the current table is out."""
        return self._tag != NO_CANARY and self._cells[0] == self._tag

    def is_out(self, table: RoutingTable) -> bool:
        """Return True if the canary of this table is out. For any thread."""
        return table.canary is not None and self._cells[0] == canary_tag(table)

    def open(self, table: RoutingTable, *, first: bool = False) -> None:
        """Take out the canary of this table. For any thread. first: unless one is out already."""
        if not first or self._cells[0] == NO_CANARY:
            self._cells[0] = canary_tag(table)

    def show_open(self) -> None:
        self._shown.set(1.0)

    def reply(
        self,
        tag: float,
        arm: Arm,
        session: str,
        bad: int,
        *,
        caller: str | None = None,
        counted: bool = False,
    ) -> None:
        """tag: the canary's when the request was assigned; replies of another are left out. bad:
        bits of what was wrong; 0 for a good reply. caller: whose request it was: a key, else an
        address. A user's name is the client's word. None: the session stands for it. counted: the
        reply was counted before, and only `bad` is new."""
        if tag != self._tag or tag == NO_CANARY:
            return
        nobody = not bad and self._cells[self._filled] != tag
        counts, first = (True, False) if nobody else self._counts(session, bad=bool(bad))
        if caller is not None:
            is_main = self._is_main(caller)
            if not nobody and not bad & ERROR:
                of_caller, first = self._counts(f"by {caller}", bad=bool(bad))
                counts = counts and (of_caller or is_main)
        if not counts:
            return
        cells = self._cells
        at = self._row + 1 + (0 if arm == "canary" else TALLY)
        if first and arm == "canary":
            for kind in range(len(KINDS)):
                cells[self._row + 1 + 2 * TALLY + kind] += bad >> kind & 1
        if not counted:
            cells[at + REPLIES] += 1.0
        if bad:
            for kind in range(len(KINDS)):
                if bad >> kind & 1:
                    cells[at + 1 + kind] += 1.0
                    self._metrics.bad_replies.inc((arm, KINDS[kind]))
        if arm == "canary" and not self.is_open:
            excess = self._test.check(*self._totals())
            if excess is not None:
                self._trip(excess)

    def _is_main(self, caller: str) -> bool:
        """Return True for a caller with half of this worker's replies, this one among them. It is
        the only one, or could end the canary anyway."""
        known = self._replies
        replies = known.get(caller, 0) + 1
        if replies > 1 or len(known) < SLOTS:
            known[caller] = replies
        self._all_replies += 1
        return 2 * replies >= self._all_replies

    def _counts(self, who: str, *, bad: bool) -> tuple[bool, bool]:
        """Return whether this reply of a caller or session counts (`FADE`), and whether it is the
        first bad one. Two workers may write one slot at once, which miscounts one reply."""
        place = self._slots + xxh3_64_intdigest(who.encode("utf-8", "replace")) % SLOTS
        if bad:
            self._cells[self._filled] = self._tag
        # The canary's tag and the replies since the first bad one, modulo FADE, in one number.
        tag, since = divmod(self._cells[place], FADE)
        if tag != self._tag:
            if bad:
                self._cells[place] = self._tag * FADE
            return True, bad
        since = (since + 1.0) % FADE
        self._cells[place] = self._tag * FADE + since
        return since == 0.0, False

    def _totals(self) -> tuple[list[float], list[float], list[float]]:
        """Return the tallies of both arms, the canary's first, and its callers by kind, summed over
        the workers that follow the same canary."""
        cells, tag = self._cells, self._tag
        total = [0.0] * (ROW - 1)
        for row in self._rows:
            if cells[row] == tag:
                for at, value in enumerate(cells[row + 1 : row + ROW]):
                    total[at] += value
        return total[:TALLY], total[TALLY : 2 * TALLY], total[2 * TALLY :]

    def _trip(self, excess: Excess) -> None:
        table = self._table
        assert table is not None, "a canary is followed"
        self.open(table)
        self.show_open()
        self._metrics.breaker_trips.inc((excess.kind,))
        log.error("canary_taken_out", canary=table.canary, reason=excess.reason)
        self._on_trip(table, excess.reason)
