"""A worker process as its parent sees it, and the rules by which the parent decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sidecar.backoff import Backoff
from sidecar.workers.handover import Handover

RESTARTS = Backoff(first_s=0.1, last_s=10.0)
LOOK_S = 1.0
"""How often the parent checks for signs of life. A worker gives four a second."""
HUNG_AFTER_S = 30.0
"""A worker without a sign of life for so long is killed. That cuts the replies it was sending, so
the parent must be certain: the longest blocking work of a loop (reading 64 MiB of answers and
writing one) took 0.5 s, and takes many times longer on a machine that swaps. 30 s is also
gunicorn's default, and what Kubernetes' liveness probe amounts to (3 failures, 10 s apart)."""


class Child:
    """One worker: its process, and what is known of its state."""

    def __init__(self, handover: Handover, process: asyncio.subprocess.Process) -> None:
        self.handover = handover
        self.process = process
        self.started = time.monotonic()
        self.ready = asyncio.Event()
        self.left = asyncio.Event()
        """It accepts no more connections: it drains, or it has ended."""
        self.ended = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self.silence = Silence()
        self.hung = False
        """It was killed because it gave no sign of life."""

    @property
    def serves(self) -> bool:
        return self.ready.is_set() and not self.left.is_set()

    def tell(self, word: str, listener: int) -> None:
        if self.writer is not None and not self.ended.is_set():
            self.writer.write(f"{word} {listener}\n".encode())

    def terminate(self) -> None:
        if not self.ended.is_set():
            self.process.terminate()

    def end_hung(self) -> None:
        """Kill it: a blocked event loop handles no other signal."""
        self.hung = True
        self.left.set()
        if self.process.returncode is None:
            self.process.kill()


class Silence:
    """How long a worker has given no sign of life. Pure.

    It counts checks instead of reading a clock: while the parent is stopped too (a frozen
    container, a laptop asleep) nothing is checked, and no worker counts as silent.
    """

    def __init__(self) -> None:
        self._signs = 0
        self._looks = 0

    def look(self, signs: int) -> float:
        """Check once. signs: how many the worker has given so far. Checks are at least `LOOK_S`
        apart. Returns: seconds without a new sign, at least."""
        self._looks = self._looks + 1 if signs == self._signs else 0
        self._signs = signs
        return self._looks * LOOK_S


def takers(serving: Sequence[bool]) -> list[int | None]:
    """Which worker accepts each listener's connections: its own, else the first one that serves;
    None when no worker serves, and the connections wait. Pure."""
    substitute = serving.index(True) if True in serving else None
    return [own if serves else substitute for own, serves in enumerate(serving)]


async def ready(child: Child) -> bool:
    """Wait until the worker serves. Returns: False when it ended instead."""
    await first_of(child.ready, child.ended)
    return child.ready.is_set()


async def first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
