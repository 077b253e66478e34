"""One of several proxy processes as its parent sees it, and what the parent decides about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sidecar.backoff import Backoff
from sidecar.worker_seat import WorkerSeat

RESTARTS = Backoff(first_s=0.1, last_s=10.0)


class Child:
    """A worker as its parent sees it."""

    def __init__(self, seat: WorkerSeat, process: asyncio.subprocess.Process) -> None:
        self.seat = seat
        self.process = process
        self.started = time.monotonic()
        self.ready = asyncio.Event()
        self.left = asyncio.Event()
        """It takes no new connections any more: it drains, or it has ended."""
        self.ended = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None

    @property
    def serves(self) -> bool:
        return self.ready.is_set() and not self.left.is_set()

    def tell(self, word: str, listener: int) -> None:
        if self.writer is not None and not self.ended.is_set():
            self.writer.write(f"{word} {listener}\n".encode())

    def terminate(self) -> None:
        if not self.ended.is_set():
            self.process.terminate()


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
