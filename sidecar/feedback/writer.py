"""Write feedback to the outbox: many records in one commit, each answered once it is on disk."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from sidecar.errors import OutboxError
from sidecar.feedback.record import Feedback, encode_feedback

MAX_WAITING: Final = 256
"""Records that wait for a commit; further ones are refused. A commit takes milliseconds."""
BATCH: Final = 64


class RecordSink(Protocol):
    """What stores packed records: `sidecar.capture.outbox.Outbox`. One thread at a time."""

    def append(self, records: list[tuple[str, bytes]]) -> int:
        """Store (id, payload) pairs and return how many were stored, from the front.

        Raises: OutboxError when none was stored.
        """

    def close(self) -> None: ...


class FeedbackWriter:
    """For one event loop: `put`, and `stop` at the end."""

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self._waiting: deque[tuple[tuple[str, bytes], asyncio.Future[None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def put(self, record: Feedback) -> None:
        """Return once the record is on the disk.

        Raises: OutboxError when it is not; nobody can tell whether it will be after a failed sync.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise OutboxError("busy", f"{MAX_WAITING} records wait to be written")
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(((record.feedback_id, encode_feedback(record)), done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        await done

    async def stop(self) -> None:
        """Write what waits, and close the file."""
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._sink.close)

    async def _drain(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            error: OutboxError | None = None
            kept = 0
            try:
                kept = await asyncio.to_thread(self._sink.append, [row for row, _ in batch])
                if kept < len(batch):
                    error = OutboxError("outbox_full", "the outbox is full (bus.max_rows, bytes)")
            except OutboxError as failure:
                error = failure
            for number, (_, done) in enumerate(batch):
                if done.done():  # the request was cancelled
                    continue
                if number < kept or error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
