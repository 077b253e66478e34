"""One of several proxy processes as its parent sees it, and what the parent decides about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sidecar.backoff import Backoff
from sidecar.workers.handover import Handover

RESTARTS = Backoff(first_s=0.1, last_s=10.0)
LOOK_S = 1.0
"""How often the parent looks for signs of life. A worker gives four a second."""
HUNG_AFTER_S = 30.0
"""A worker that gave no sign for so long is ended. It cuts what the worker was sending, so it must
be certain: the longest piece of work that a loop has (64 MiB of answers read and one of them
written) took 0.5 s, and a machine that swaps may make that many times longer. It is also gunicorn's
default, and what Kubernetes' liveness probe comes to (3 failures, 10 s apart)."""


class Child:
    """A worker as its parent sees it."""

    def __init__(self, handover: Handover, process: asyncio.subprocess.Process) -> None:
        self.handover = handover
        self.process = process
        self.started = time.monotonic()
        self.ready = asyncio.Event()
        self.left = asyncio.Event()
        """It takes no new connections any more: it drains, or it has ended."""
        self.ended = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self.silence = Silence()
        self.hung = False
        """It was ended because it gave no sign of life."""

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
        """Kill it: a loop that stands still hears nothing else."""
        self.hung = True
        self.left.set()
        if self.process.returncode is None:
            self.process.kill()


class Silence:
    """For how long a worker has given no sign of life, as one look after the other tells. Pure.

    What counts is looks, not a clock: while the parent stands still too (a container is frozen, a
    laptop asleep) nobody looks, and nobody is silent.
    """

    def __init__(self) -> None:
        self._signs = 0
        self._looks = 0

    def look(self, signs: int) -> float:
        """signs: how many it has given by now. Looks are `LOOK_S` apart, or more. Returns: seconds
        without a new one, at least."""
        self._looks = self._looks + 1 if signs == self._signs else 0
        self._signs = signs
        return self._looks * LOOK_S


def takers(serving: Sequence[bool]) -> list[int | None]:
    """Who takes each listener's connections: its own worker, else the first one that serves; None
    when none does, and then they wait. Pure."""
    substitute = serving.index(True) if True in serving else None
    return [own if serves else substitute for own, serves in enumerate(serving)]


async def ready(child: Child) -> bool:
    """Wait until it serves. False: it ended instead."""
    await first_of(child.ready, child.ended)
    return child.ready.is_set()


async def first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
