"""Loops that run for the life of the process. None of them ends by an error, or ends another.

An error that the work does not expect is logged with its type and text, kept for the status page
and `/readyz`, and tried again after a wait that doubles. So a defect in one loop leaves the admin
API, and with it the way to roll back, as it was.
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
    """How a loop does. In memory, for the status page."""

    failures: int = 0
    """Turns in a row that ended with an error; 0: all is well."""
    error: str | None = None
    """The last of these errors."""


class Loop:
    """Does `work`, waits `every_s()` or until woken, and again."""

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
        """Never returns; ends when its task is cancelled."""
        while True:
            self._wake.clear()
            pause_s = await self.turn()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def turn(self) -> float:
        """Work once. Returns: seconds to wait until the next time."""
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
