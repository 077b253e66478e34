"""Measure the event loop's lag: how late a timer fires.

Each firing is also a heartbeat, by which the parent of several workers finds one that hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sidecar.metrics.hot import Histogram

INTERVAL_S = 0.25


class LoopLag:
    """Measures the lag every `INTERVAL_S` seconds, from `start` to `stop`.

    The loop's timers have a resolution of one millisecond, so a smaller lag is not seen.
    """

    def __init__(self, histogram: Histogram, give_sign: Callable[[], None]) -> None:
        """give_sign: called each time the timer fires."""
        self._histogram = histogram
        self._give_sign = give_sign
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        due = time.perf_counter() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._fired, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fired(self, due: float) -> None:
        self._histogram.observe(max(0.0, time.perf_counter() - due))
        self._give_sign()
        self.start()
