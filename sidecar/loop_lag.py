"""How long the relay's loop makes everybody wait: a timer that measures how late it fires."""

from __future__ import annotations

import asyncio
import time

from sidecar.hot_metrics import Histogram

INTERVAL_S = 0.1


class LoopLag:
    """`start` it, `stop` it. Ten microseconds of work a second.

    The loop's timers count whole milliseconds, so less than one is not told from none.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        due = time.perf_counter() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._fired, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fired(self, due: float) -> None:
        self._histogram.observe(max(0.0, time.perf_counter() - due))
        self.start()
