"""The writer of feedback on a disk that is slow, or locked by another process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sidecar.errors import OutboxError
from sidecar.feedback import BATCH, Feedback, FeedbackWriter


def make_feedback(name: str) -> Feedback:
    return Feedback(
        feedback_id=name,
        kind="feedback",
        target_kind="exchange",
        target="e1",
        project="default",
        source="user:bob",
        received_at=1.0,
        score=1.0,
    )


class HeldSink:
    """A sink that waits until it is let go, and then fails or stores."""

    def __init__(self, error: OutboxError | None = None) -> None:
        self.error = error
        self.go = threading.Event()
        self.begun = threading.Event()
        self.batches: list[list[str]] = []

    def append(self, records: list[tuple[str, bytes]]) -> int:
        self.batches.append([name for name, _ in records])
        self.begun.set()
        assert self.go.wait(60.0)
        if self.error is not None:
            raise self.error
        return len(records)

    def close(self) -> None: ...


async def test_a_lock_costs_all_that_wait_one_attempt_together() -> None:
    sink = HeldSink(OutboxError("locked", "database is locked"))
    writer = FeedbackWriter(sink, wait_s=60.0)
    puts = [
        asyncio.create_task(writer.put(make_feedback(f"f{number}"))) for number in range(3 * BATCH)
    ]
    await asyncio.to_thread(sink.begun.wait)

    sink.go.set()
    results = await asyncio.gather(*puts, return_exceptions=True)

    assert {getattr(one, "reason", None) for one in results} == {"locked"}
    assert len(sink.batches) == 1


async def test_nobody_waits_longer_than_the_bound_and_what_was_answered_is_not_written() -> None:
    sink = HeldSink()
    writer = FeedbackWriter(sink, wait_s=0.05)
    first = asyncio.create_task(writer.put(make_feedback("f1")))
    await asyncio.to_thread(sink.begun.wait)
    second = asyncio.create_task(writer.put(make_feedback("f2")))

    for waiting in (first, second):
        with pytest.raises(OutboxError, match=r"waited for 0\.05 s") as caught:
            await waiting
        assert caught.value.reason == "slow"

    sink.go.set()
    await writer.stop()
    assert sink.batches == [["f1"]]
