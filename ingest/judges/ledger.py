"""Keep in the store what the judges cost, and refuse a judgement when a budget is spent.

With a budget, each call reserves what it may cost before it is made, in the transaction that reads
what is spent: so processes that ask at once know of each other, and a process that is killed leaves
the reservation, not a hole. After the call the reservation becomes what the call did cost. Without
a budget nothing is reserved. What the store does not take is kept and written with the next call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import structlog
from sqlalchemy.orm import Session

from ingest.errors import JudgeSpentError
from ingest.judges.spending import (
    Amount,
    SpentBudget,
    first_spent,
    lock_rows,
    read_spending,
    rows_of,
)
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, count

Counts = Mapping[tuple[str, str], int]
"""(stage, reason) -> what is added to that counter."""

log = structlog.get_logger()


class Ledger:
    """The spending of one process's judges. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        settings: JudgeSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._unwritten: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held by the thread that writes: what it has taken is in the store when the next reads."""
        self._writing: asyncio.Task[None] | None = None
        self.in_dollars = bool(settings.budget or settings.budget_per_hour)
        self.has_budget = self.in_dollars or bool(settings.budget_tokens)

    async def reserve(self, amount: Amount, *, begun: bool) -> Counts:
        """Reserve what a call may cost.

        begun: the judgement has paid for a call already, so it is finished whatever is spent.
        Returns: the reservation, for `settle`.
        Raises: JudgeSpentError; StoreError when nobody can know what is spent.
        """
        now = self._clock()
        if not self.has_budget:
            return {}
        rows = rows_of(amount, self._settings, now=now)
        spent = await asyncio.to_thread(self._reserve, rows, now, not begun)
        if spent is not None:
            raise JudgeSpentError(spent.why, until=spent.until.timestamp())
        return rows

    def settle(self, reserved: Counts, amount: Amount | None) -> None:
        """End a call.

        amount: what its provider may have charged without saying so, as far as that can be
            estimated; None when all is known (`spend`).
        """
        if amount is None:
            self.note({key: -number for key, number in reserved.items()})
        elif not reserved:
            self.spend(amount)

    def spend(self, amount: Amount) -> None:
        """Note what a provider charged."""
        self.note(rows_of(amount, self._settings, now=self._clock()))

    def note(self, counts: Counts) -> None:
        """Add to counters, in memory until the next write."""
        with self._lock:
            self._unwritten.update(counts)

    def write_soon(self) -> None:
        """Begin to write what is noted, unless a write is under way."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def aclose(self) -> None:
        """Write what is noted. What a store refuses now is lost, and logged."""
        if self._writing is not None:
            await self._writing
        await self._write()

    async def _write(self) -> None:
        while any(self._unwritten.values()):
            try:
                await asyncio.to_thread(self._reserve, {}, self._clock(), False)
            except StoreError as error:
                log.warning("judge_costs_not_stored", error=str(error))
                return

    def _reserve(self, rows: Counts, now: float, check: bool) -> SpentBudget | None:
        """Write the rows and what is noted, unless a budget is spent. Raises: StoreError."""
        with self._turn:
            return self._reserve_alone(rows, now, check)

    def _reserve_alone(self, rows: Counts, now: float, check: bool) -> SpentBudget | None:
        with self._lock:
            noted, self._unwritten = self._unwritten, Counter()

        def work(session: Session) -> SpentBudget | None:
            lock_rows(session, now=now)
            spending = read_spending(session, now=now, unwritten=noted)
            spent = first_spent(spending, self._settings, now=now) if check else None
            for counts in (noted,) if spent is not None else (noted, rows):
                for (stage, reason), number in counts.items():
                    count(session, stage, reason, number)
            return spent

        try:
            return self._database.repeat(work, alone=False)
        except StoreError:
            self.note(noted)
            raise
