"""Cooperative yielding for a thread that shares a CPU core and the interpreter with the relay.

A thread that works for milliseconds at a stretch delays the relay until the kernel's scheduler
switches: 1.5 ms at the 99th percentile, measured on one core, with any Python switch interval. A
low thread priority does not help: when other programs use the core, a low-priority thread that
holds the interpreter lock delays the relay for even longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

WORK_S = 300e-6
"""Longest stretch of work, in seconds. Shorter stretches cost more than they save, because both
threads find cold caches after each switch: with 100 us a capture takes 1.5 times the CPU time."""
PAUSE_S = 20e-6
"""Requested length of a pause, in seconds. Linux's timer slack makes it at least 70 us."""


class CooperativeYield(Protocol):
    """Called between two steps of work; pauses when the stretch of work was long enough."""

    def __call__(self) -> None: ...


def never_yield() -> None:
    """Never pause: for a thread that shares its core with no relay."""


class Yielding:
    """Pauses for `pause_s` after each `work_s` of work. For one thread."""

    def __init__(
        self,
        *,
        work_s: float = WORK_S,
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._work_s = work_s
        self._pause_s = pause_s
        self._clock = clock
        self._sleep = sleep
        self._since = clock()

    def __call__(self) -> None:
        if self._clock() - self._since >= self._work_s:
            self._sleep(self._pause_s)
            self._since = self._clock()
