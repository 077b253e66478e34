"""Short stretches of work for a thread that shares its core, and its interpreter, with the relay.

A thread that works for milliseconds at a stretch makes the relay wait for its core as long as the
kernel's scheduler likes: 1.5 ms at the 99th percentile, measured on one core, whatever Python's
switch interval. A lower priority would not do: a thread of low priority that holds the interpreter
when other programs want the core would hold the relay up with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

WORK_S = 300e-6
"""Shorter stretches cost more than they give: after each change of threads both find their caches
cold (100 us: half as much CPU again for a capture, and the median of the relay's time with it)."""
REST_S = 20e-6
"""Asked for; with Linux's timer slack it is 70 us and more."""


class Rest(Protocol):
    """Called between two steps of the work: rests if it is time to."""

    def __call__(self) -> None: ...


def never() -> None:
    """For a thread that nobody waits for."""


class Yielding:
    """For one thread."""

    def __init__(
        self,
        *,
        work_s: float = WORK_S,
        rest_s: float = REST_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._work_s = work_s
        self._rest_s = rest_s
        self._clock = clock
        self._sleep = sleep
        self._since = clock()

    def __call__(self) -> None:
        if self._clock() - self._since >= self._work_s:
            self._sleep(self._rest_s)
            self._since = self._clock()
