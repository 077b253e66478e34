"""A worker process as its parent sees it, and the rules by which the parent decides.

`Silence` and `HUNG_AFTER_S` decide when a worker hangs; `sidecar.workers.parent` applies them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sidecar.backoff import Backoff
from sidecar.workers.handover import Handover

RESTARTS = Backoff(first_s=0.1, last_s=10.0)
CHECK_INTERVAL_S = 1.0
"""Pause between two checks for signs of life, in seconds. A worker gives four signs a second."""
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
        """The worker accepts no more connections: it drains or has ended."""
        self.ended = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self.silence = Silence()
        self.hung = False
        """The parent killed the worker because it gave no sign of life."""

    @property
    def serves(self) -> bool:
        return self.ready.is_set() and not self.left.is_set()

    def tell(self, *words: str | int) -> None:
        if self.writer is not None and not self.ended.is_set():
            self.writer.write(f"{' '.join(map(str, words))}\n".encode())

    def terminate(self) -> None:
        if not self.ended.is_set():
            self.process.terminate()

    def end_hung(self) -> None:
        """Kill the worker. A blocked event loop handles no other signal."""
        self.hung = True
        self.left.set()
        if self.process.returncode is None:
            self.process.kill()


class Silence:
    """Measures how long a worker has given no sign of life. Pure.

    It counts checks instead of reading a clock: while the parent does not run either (a frozen
    container, a sleeping laptop), no check happens and no worker becomes silent.
    """

    def __init__(self) -> None:
        self._signs = 0
        self._silent_checks = 0

    def check(self, signs: int) -> float:
        """Compare with the last check, at least `CHECK_INTERVAL_S` ago.

        signs: signs of life since the worker started. Returns: the least number of seconds since
        the last new sign.
        """
        self._silent_checks = self._silent_checks + 1 if signs == self._signs else 0
        self._signs = signs
        return self._silent_checks * CHECK_INTERVAL_S


def takers(serving: Sequence[bool]) -> list[int | None]:
    """Choose the worker that accepts each listener's connections. Pure.

    It is the listener's own worker if that one serves, else the first that does. None: no worker
    serves, and the connections wait.
    """
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
