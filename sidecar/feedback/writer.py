"""Write feedback to the outbox: many records in one commit, each answered once it is on disk.

A client waits meanwhile, so the wait is bounded: while another process holds the file's lock, all
records that wait are refused together, after the time of one attempt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from sidecar.errors import OutboxError
from sidecar.feedback.record import Feedback, encode_feedback

MAX_WAITING: Final = 256
"""Records that wait for a commit; further ones are refused. A commit takes milliseconds."""
BATCH: Final = 64
LOCKED_S: Final = 1.0
"""Longest wait of one attempt for the lock of the file; writers hold it for milliseconds."""
WAIT_S: Final = 5.0
"""Longest wait of a record, whatever holds it up: a disk whose syncs take seconds, for one."""
LOCKED: Final = "locked"


class RecordSink(Protocol):
    """What stores packed records: `sidecar.capture.outbox.Outbox`. One thread at a time."""

    def append(self, records: list[tuple[str, bytes]]) -> int:
        """Store (id, payload) pairs and return how many were stored, from the front.

        Raises: OutboxError when none was stored.
        """

    def close(self) -> None: ...


class FeedbackWriter:
    """For one event loop: `put`, and `stop` at the end."""

    def __init__(self, sink: RecordSink, *, wait_s: float = WAIT_S) -> None:
        self._sink = sink
        self._wait_s = wait_s
        self._waiting: deque[tuple[tuple[str, bytes], asyncio.Future[None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def put(self, record: Feedback) -> None:
        """Return once the record is on the disk.

        Raises: OutboxError when it is not, after `wait_s` at the latest; nobody can tell whether it
            will be after a failed or a slow sync.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise OutboxError("busy", f"{MAX_WAITING} records wait to be written")
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(((record.feedback_id, encode_feedback(record)), done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        try:
            await asyncio.wait_for(done, self._wait_s)
        except TimeoutError:
            raise OutboxError("slow", f"a record waited for {self._wait_s:g} s") from None

    async def stop(self) -> None:
        """Write what waits, and close the file."""
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._sink.close)

    def _batch(self) -> list[tuple[tuple[str, bytes], asyncio.Future[None]]]:
        """Take the next records; those whose requests were answered already are left out."""
        batch: list[tuple[tuple[str, bytes], asyncio.Future[None]]] = []
        while self._waiting and len(batch) < BATCH:
            one = self._waiting.popleft()
            if not one[1].done():
                batch.append(one)
        return batch

    async def _drain(self) -> None:
        while self._waiting:
            batch = self._batch()
            if not batch:
                return
            error: OutboxError | None = None
            kept = 0
            try:
                kept = await asyncio.to_thread(self._sink.append, [row for row, _ in batch])
                if kept < len(batch):
                    error = OutboxError("outbox_full", "the outbox is full (bus.max_rows, bytes)")
            except OutboxError as failure:
                error = failure
            if error is not None and error.reason == LOCKED:
                # The others would wait as long for the same lock.
                batch += self._waiting
                self._waiting.clear()
            for number, (_, done) in enumerate(batch):
                if done.done():  # the request was cancelled
                    continue
                if number < kept or error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
