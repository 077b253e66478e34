"""The intake loop: consume a batch, decide new exchanges, decide the backlog from time to time.

This loop has its own thread, so it calls the store directly; it stops between two batches. While
the bus or the store is unreachable it logs that and waits, longer each time. It then continues
where it was, because a record leaves the bus only once the store has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import structlog

from ingest.errors import BusError
from ingest.feedback.store import ABANDONED_AFTER_S, PAGE, find_abandoned
from ingest.grouping import request
from ingest.grouping.selection import rules_of
from ingest.intake.bus import BusReader, BusReport
from ingest.intake.choose import Sessions, choose_backlog, choose_new, decide
from ingest.intake.consume import consume
from ingest.privacy.screen import Screen
from ingest.retention.sweep import Sweeper
from ingest.reward_watch.store import AnswerWatch
from ingest.tokens import FLAG, TokenCheck
from ingest.vllm.watch import EngineWatch
from sidecar.backoff import Backoff
from sidecar.errors import StoreError, StoreNewerError, StoreOlderError
from sidecar.settings import Settings
from sidecar.store.database import Database, get_flag, set_flag

POLL_INTERVAL_S = 0.2
"""Pause when the bus is empty."""
BATCH = 200
"""Records in one transaction, which other processes wait for."""
BACKLOG_INTERVAL_S = 2.0
ABANDONED_INTERVAL_S = 10.0
"""Seconds between two looks for abandoned sessions, once the pass has caught up."""
SWEEPS = 4
"""Steps of retention in one step at most, each a page or a transaction: with 50 exchanges each
it deletes as many as a batch of default size brings."""
PAUSES = Backoff(first_s=0.5, last_s=30.0)
"""Pauses between attempts while the bus or the store is unreachable."""

log = structlog.get_logger()


class Intake:
    """Consumes exchanges until stopped."""

    def __init__(
        self,
        bus: BusReader,
        database: Database,
        settings: Settings,
        *,
        now: Callable[[], float] = time.time,
        engine: EngineWatch | None = None,
        batch: int = BATCH,
    ) -> None:
        """engine: watches the facts about vLLM; None: built from the settings."""
        self._bus = bus
        self._database = database
        self._batch = batch
        self._report = BusReport(bus, database)
        self._held_out_rate = settings.groups.held_out_rate
        self._sessions = Sessions(held_out_rate=self._held_out_rate)
        self._model = settings.serving.model
        self._tokens = TokenCheck(settings.serving.base_model_path)
        self._engine = engine or EngineWatch(settings.serving)
        self._rules = rules_of(settings)
        self._screen = Screen(settings.privacy)
        self._sweeper = Sweeper(database, settings.retention)
        self._watch = AnswerWatch(database, settings.lines)
        self._now = now
        self._backlog_due = 0.0
        self._abandoned_due = 0.0
        self._prepared = False
        self._restored: int | None = None
        """The bus's epoch at which the sessions were read from the store."""
        self._published = False
        """True once the store holds the state of the token check and the facts about vLLM."""
        self._failures = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set. Raises: StoreNewerError or StoreOlderError."""
        while not stop.is_set():
            pause_s = self.attempt()
            try:
                await asyncio.wait_for(stop.wait(), timeout=pause_s)
            except TimeoutError:
                continue

    def attempt(self) -> float:
        """Run one step and log its errors. Returns: seconds to wait before the next step. Raises:
        StoreNewerError or StoreOlderError, for which no waiting helps."""
        try:
            taken = self.step()
        except (StoreNewerError, StoreOlderError):
            raise
        except (BusError, StoreError) as error:
            if isinstance(error, BusError):
                self._report.failed(error, self._now())
            self._failures += 1
            pause_s = PAUSES.wait_s(self._failures)
            log.warning("intake_waits", error=str(error), pause_s=pause_s)
            return pause_s
        if self._failures:
            log.warning("intake_goes_on", failures=self._failures)
        self._failures = 0
        return 0.0 if taken else POLL_INTERVAL_S

    def step(self) -> int:
        """Consume a batch and decide new exchanges.

        No exchange is decided before the first probe of vLLM has ended.
        Returns: the number of records or exchanges processed, and of retention's transactions.
        Raises: BusError or StoreError; nothing is lost, the next step retries.
        """
        now = self._now()
        if not self._prepared:
            self._database.upgrade()
            with self._database.read() as session:
                found = get_flag(session, request.FLAG)
            if found is not None:
                self._engine.recall(request.load_facts(found))
            self._prepared = True
        epoch = self._bus.epoch()
        if epoch != self._restored:
            self._sessions = Sessions(held_out_rate=self._held_out_rate)
            self._sessions.restore(self._database, now=now)
            self._restored = epoch
        self._report.report(now)
        changes = (self._tokens.poll(now), self._engine.poll(now))
        if any(changes) or not self._published:
            self._published = False
            with self._database.write(alone=False) as session:
                set_flag(session, FLAG, self._tokens.state, now=now)
                known = request.dump_facts(self._engine.facts)
                set_flag(session, request.FLAG, known, now=now)
            self._published = True
        decide_now = partial(decide, rules=self._rules, model=self._model, now=now)
        consumed = consume(
            self._bus,
            self._database,
            limit=self._batch,
            sessions=self._sessions,
            now=now,
            check_tokens=self._tokens,
            decide=decide_now if self._engine.ready and not self._rules.settle_s else None,
            screen=self._screen,
            keeps_unread=self._screen.keeps_unread or bool(self._database.keyring),
        )
        if consumed.read:
            log.info("consumed", **asdict(consumed))
        if now >= self._abandoned_due:
            seen = find_abandoned(self._database, after_s=ABANDONED_AFTER_S, now=now)
            self._abandoned_due = now if seen == PAGE else now + ABANDONED_INTERVAL_S
        self._watch.step(now)
        swept = sum(1 for _ in range(SWEEPS) if self._sweeper.step(now))
        if not self._engine.ready:
            return consumed.read + swept
        decided = consumed.decided + choose_new(
            self._database, self._rules, model=self._model, limit=self._batch, now=now
        )
        if now >= self._backlog_due:
            self._backlog_due = now + BACKLOG_INTERVAL_S
            choose_backlog(self._database, self._rules, model=self._model, now=now)
        return consumed.read + decided + swept
