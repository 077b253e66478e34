"""Log what may happen to every request, without a line for every request.

A log line may block the event loop, and a thousand of them say no more than one with a count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import structlog

log = structlog.get_logger()


class RateLimitedLog:
    """At most one line an event in each interval; the next one says how many were left out."""

    def __init__(
        self, *, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, event: str, **fields: object) -> None:
        now = self._clock()
        last = self._last.get(event)
        if last is not None and now - last < self._interval_s:
            self._left_out[event] += 1
            return
        self._last[event] = now
        log.warning(event, left_out=self._left_out.pop(event, 0), **fields)
