"""Loops that run as long as the process. An error ends none of them, and none ends another.

An unexpected error is logged with its type and text, shown by `/admin/v1/status` and `/readyz`, and
the work is tried again after a wait that doubles. A defect in one loop so leaves the admin API, and
with it the rollback, as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from deploy.errors import error_line
from deploy.supervise.processes import RESTARTS
from sidecar.backoff import Waits
from sidecar.errors import StoreError

log = structlog.get_logger()

STORE_RETRY_S = 1.0


@dataclass(slots=True)
class LoopView:
    """The health of one loop: kept in memory, shown by `/admin/v1/status`."""

    failures: int = 0
    """Turns in a row that ended with an error; 0: the loop works."""
    error: str | None = None
    """The last of these errors."""


class Loop:
    """Runs `work`, waits `every_s()` or until woken, and repeats."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[object]],
        every_s: Callable[[], float],
        wake: asyncio.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.view = LoopView()
        self._work = work
        self._every_s = every_s
        self._wake = wake or asyncio.Event()
        self._clock = clock
        self._waits = Waits(RESTARTS)

    async def run(self) -> None:
        """Repeat until the task is cancelled."""
        while True:
            self._wake.clear()
            pause_s = await self.turn()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def turn(self) -> float:
        """Run the work once. Returns: seconds to wait until the next turn."""
        began = self._clock()
        try:
            await self._work()
        except StoreError as error:
            log.warning("store_away", loop=self.name, reason=str(error))
            self._failed(error)
            return STORE_RETRY_S
        except Exception as error:
            self._failed(error)
            wait_s = self._waits.restart_s(self._clock() - began)
            log.error(
                "loop_failed",
                loop=self.name,
                error=self.view.error,
                failures=self.view.failures,
                retry_in_s=wait_s,
                exc_info=self.view.failures == 1,
            )
            return wait_s
        if self.view.failures:
            log.info("loop_recovered", loop=self.name, failures=self.view.failures)
        self.view = LoopView()
        self._waits.reset()
        return self._every_s()

    def _failed(self, error: Exception) -> None:
        self.view = LoopView(failures=self.view.failures + 1, error=error_line(error))
