"""How long the relay's loop makes everybody wait: a timer that measures how late it fires.

That it fires at all is the loop's sign of life, for the parent of several workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sidecar.metrics.hot import Histogram

INTERVAL_S = 0.25


class LoopLag:
    """`start` it, `stop` it. Microseconds of work, four times a second.

    The loop's timers count whole milliseconds, so less than one is not told from none.
    """

    def __init__(self, histogram: Histogram, give_sign: Callable[[], None]) -> None:
        """give_sign: called each time that the timer fires."""
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
