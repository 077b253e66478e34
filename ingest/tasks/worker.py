"""The worker of whole tasks: follows the store, draws groups, and has them judged. The scoring
process has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from ingest.tasks.enrol import follow
from ingest.tasks.judging import TaskJudging
from ingest.tasks.rehearsals import RehearsalWorker
from ingest.vllm.watch import engine_of
from sidecar.backoff import Backoff
from sidecar.errors import StoreError
from sidecar.processes import tell_ready
from sidecar.settings import Settings, open_keyring
from sidecar.settings.learning import Tasks
from sidecar.store.database import Database

TICK_S: Final = 2.0
"""Seconds between two looks."""
PAUSES: Final = Backoff(first_s=TICK_S, last_s=30.0)
"""Pauses while the store is unreachable."""

log = structlog.get_logger()


class TaskWorker:
    """Makes groups of whole sessions until stopped. One per store."""

    def __init__(
        self,
        database: Database,
        settings: Tasks,
        judging: TaskJudging | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """judging: None: outcomes alone are the rewards."""
        self._database = database
        self._judging = judging
        self._settings = settings
        self._now = now

    async def run(self, stop: asyncio.Event) -> None:
        failures = 0
        while not stop.is_set():
            pause_s = TICK_S
            try:
                drawn = await asyncio.to_thread(self.step)
                if drawn:
                    log.info("task_groups_drawn", groups=drawn)
                if self._judging is not None and await self._judging.step():
                    pause_s = 0.0
                failures = 0
            except StoreError as error:
                failures += 1
                pause_s = PAUSES.wait_s(failures)
                log.warning("tasks_wait", error=str(error), pause_s=pause_s)
            try:
                await asyncio.wait_for(stop.wait(), timeout=pause_s)
            except TimeoutError:
                continue

    def step(self) -> int:
        """Look at what is new in the store. Returns: the number of groups drawn. Raises:
        StoreError; the next step begins where this one failed."""
        return follow(self._database, self._settings, now=self._now())


async def draw_until(stop: asyncio.Event, settings: Settings) -> int:
    """Draw the groups that outcomes alone reward, and rehearse, until `stop` is set: no judge is
    needed.

    Returns: the process's exit code; 1 when the store cannot be opened.
    """
    try:
        database = Database(settings.store.url, open_keyring(settings.store))
        await asyncio.to_thread(database.upgrade)
    except StoreError as error:
        log.error("store_not_ready", error=str(error))
        return 1
    engine = engine_of(settings)
    tell_ready()
    try:
        async with asyncio.TaskGroup() as workers:
            if settings.tasks.learn == "outcome":
                workers.create_task(TaskWorker(database, settings.tasks).run(stop))
            if settings.rehearsals.are_on:
                workers.create_task(RehearsalWorker(database, engine, settings).run(stop))
    finally:
        await engine.aclose()
        database.close()
    return 0
