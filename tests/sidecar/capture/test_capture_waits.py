"""The capture's thread sleeps while there is nothing to do, and misses nothing by it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from structlog.testing import capture_logs

from sidecar.capture.assemble import Turns, assemble
from sidecar.capture.outbox import ROWS_AT_ONCE, Outbox, OutboxReader
from sidecar.capture.recorder import EARLY, Capture, Limits
from sidecar.capture.reply_buffer import HeldBytes, ReplyBuffer
from sidecar.metrics.proxy import Metrics
from sidecar.records import Exchange, RawCapture
from support.exchanges import make_raw_capture
from support.proxy_kit import Wire

LONG_S = 600.0
"""A flush interval that no test outlives."""


def raw(number: int = 0) -> RawCapture:
    return make_raw_capture(f"ex_{number}", (b'{"model":"m"}',))


class SpiedEvent(threading.Event):
    """Remembers how it was waited for; `after_wake` runs when the thread was woken and has done
    nothing yet, `before_clear` before it is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self.began = threading.Semaphore(0)
        self.after_wake: Callable[[], None] | None = None
        self.before_clear: Callable[[], None] | None = None
        self.was_set = threading.Event()

    def set(self) -> None:
        super().set()
        self.was_set.set()

    def clear(self) -> None:
        hook, self.before_clear = self.before_clear, None
        if hook is not None:
            hook()
        super().clear()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self.began.release()
        woken = super().wait(timeout)
        hook, self.after_wake = self.after_wake, None
        if hook is not None:
            hook()
        return woken


class TrickyQueue(deque[tuple[RawCapture, int]]):
    """Adds more captures right after the capture thread has read the length, when armed."""

    after_length_check: Callable[[], None] | None = None

    def __len__(self) -> int:
        length = super().__len__()
        if threading.current_thread().name == "capture":
            hook, self.after_length_check = self.after_length_check, None
            if hook is not None:
                hook()
        return length


class Waiting:
    """A capture with its thread, spied upon."""

    def __init__(self, sink: Any, **limits: Any) -> None:
        self.sink = sink
        self.metrics = Metrics()
        self.work = SpiedEvent()
        self.queue = TrickyQueue()
        self.capture = Capture(Limits(**limits), sink, self.metrics, None)
        self.capture._queue, self.capture._work = self.queue, self.work
        self.started = False

    def start(self) -> None:
        """And wait until the thread sleeps, or waits."""
        self.started = True
        self.capture.start()
        self.await_wait()

    def await_wait(self) -> None:
        assert self.work.began.acquire(timeout=60), "the thread went not to sleep"

    def names(self) -> list[str]:
        return [item.exchange_id for item in self.sink.exchanges]

    def lost(self, reason: str) -> float:
        labels = {"reason": reason}
        return self.metrics.registry.get_sample_value("sidecar_captures_lost_total", labels) or 0.0


MakeWaiting = Callable[..., Waiting]


@pytest.fixture
def make(wire: Wire) -> Iterator[MakeWaiting]:
    made: list[Waiting] = []

    def start(**limits: Any) -> Waiting:
        made.append(Waiting(wire.Sink(), **limits))
        return made[-1]

    yield start
    for item in made:
        if item.started:
            item.capture.stop(60.0)


def test_a_single_capture_is_written_after_the_interval_and_then_the_thread_sleeps(
    make: MakeWaiting,
) -> None:
    waiting = make(flush_interval_s=0.05)
    waiting.start()
    waiting.capture.offer(raw(1))

    waiting.sink.wait_for(1, 60.0)

    waiting.await_wait()
    waiting.await_wait()
    assert waiting.work.waits == [None, 0.05, None]
    assert waiting.names() == ["ex_1"]


def test_many_captures_do_not_wait_for_the_interval(make: MakeWaiting) -> None:
    waiting = make(flush_interval_s=LONG_S)
    waiting.start()
    waiting.capture.offer(raw(0))
    waiting.await_wait()  # for the interval

    for number in range(1, EARLY):
        waiting.capture.offer(raw(number))

    waiting.sink.wait_for(EARLY, 60.0)
    assert waiting.names() == [f"ex_{number}" for number in range(EARLY)]


@pytest.mark.parametrize("queued", [0, 1])
def test_a_stop_that_comes_as_the_thread_begins_is_obeyed_and_nothing_is_left(
    queued: int, make: MakeWaiting
) -> None:
    """The thread clears earlier wake-ups before it checks for work; it must not lose a stop so."""
    waiting = make(flush_interval_s=LONG_S)
    for number in range(queued):
        waiting.capture.offer(raw(number))
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(waiting.capture.stop(10.0)))

    def stop() -> None:
        stopping.start()
        assert waiting.work.was_set.wait(10.0)

    waiting.work.before_clear = stop
    waiting.started = True
    waiting.capture.start()
    assert waiting.work.was_set.wait(30.0)
    stopping.join(30.0)

    assert stopped == [True]
    assert waiting.names() == [f"ex_{number}" for number in range(queued)]


FULL: dict[str, dict[str, int]] = {
    "queue_full": {"max_pending": 2},
    "memory_full": {"max_pending_bytes": 2 * raw().size},
}


@pytest.mark.parametrize(
    ("reason", "dropped"),
    [("queue_full", 0), ("queue_full", 1), ("queue_full", 3), ("memory_full", 1)],
)
def test_a_queue_that_fills_before_the_woken_thread_runs_does_not_wait_for_the_interval(
    make: MakeWaiting, reason: str, dropped: int
) -> None:
    """The first capture wakes the thread; before it runs, the others come."""
    waiting = make(flush_interval_s=LONG_S, **FULL[reason])

    def fill() -> None:
        for number in range(1, 2 + dropped):
            waiting.capture.offer(raw(number))

    waiting.work.after_wake = fill
    waiting.start()

    waiting.capture.offer(raw(0))

    waiting.sink.wait_for(2, 60.0)
    assert waiting.names() == ["ex_0", "ex_1"]
    assert waiting.lost(reason) == dropped


def losses(logs: list[Any]) -> list[tuple[str, int]]:
    return [(item["reason"], item["count"]) for item in logs if item["event"] == "captures_lost"]


def test_a_loss_is_logged_though_nothing_is_queued(make: MakeWaiting) -> None:
    waiting = make(flush_interval_s=0.01)
    with capture_logs() as logs:
        waiting.start()

        waiting.capture.lose("reply_too_long", 1)
        waiting.await_wait()  # for the interval
        waiting.await_wait()  # for work: all is done

        assert losses(logs) == [("reply_too_long", 1)]


def test_many_losses_make_one_line_an_interval(make: MakeWaiting) -> None:
    waiting = make(flush_interval_s=LONG_S)
    with capture_logs() as logs:
        waiting.start()
        waiting.capture.lose("reply_too_long", 1)
        waiting.await_wait()
        for _ in range(1000):
            waiting.capture.lose("reply_too_long", 1)
            time.sleep(0)
        assert losses(logs) == []

        assert waiting.capture.stop(60.0)

        assert losses(logs) == [("reply_too_long", 1001)]
    assert waiting.lost("reply_too_long") == 1001


def test_a_capture_that_comes_right_after_the_check_for_work_wakes_the_thread(
    make: MakeWaiting,
) -> None:
    waiting = make(flush_interval_s=0.001)
    waiting.queue.after_length_check = lambda: waiting.capture.offer(raw(1))
    waiting.start()

    waiting.sink.wait_for(1, 60.0)


def test_a_loss_that_comes_right_after_the_check_for_work_is_logged(make: MakeWaiting) -> None:
    waiting = make(flush_interval_s=0.001)
    waiting.queue.after_length_check = lambda: waiting.capture.lose("reply_too_long", 1)
    with capture_logs() as logs:
        waiting.start()  # it waits for the interval
        waiting.await_wait()

        assert losses(logs) == [("reply_too_long", 1)]


def test_the_capture_that_completes_a_batch_right_after_the_length_check_wakes_the_thread(
    make: MakeWaiting,
) -> None:
    waiting = make(flush_interval_s=LONG_S)
    waiting.start()

    def fill() -> None:
        """The thread is awake and will check whether a batch is complete; the last capture comes
        right after that check."""
        for number in range(1, EARLY - 1):
            waiting.capture.offer(raw(number))
        waiting.queue.after_length_check = lambda: waiting.capture.offer(raw(EARLY - 1))

    waiting.work.after_wake = fill
    waiting.capture.offer(raw(0))

    waiting.sink.wait_for(EARLY, 60.0)
    assert waiting.names()[-1] == f"ex_{EARLY - 1}"


def test_the_thread_yields_between_captures_unless_it_must_keep_up(wire: Wire) -> None:
    waiting_at_yield: list[int] = []
    capture = Capture(
        Limits(max_pending=200),
        wire.Sink(),
        Metrics(),
        None,
        lambda: waiting_at_yield.append(len(capture._queue)),
    )
    for number in range(200):
        capture.offer(raw(number))

    capture.start()
    assert capture.stop(60.0)

    # Batches of 64: behind the first 136 wait, more than half of what may; then 72, 8, none.
    assert waiting_at_yield == [72] * 64 + [8] * 64 + [0] * 8


def exchange(number: int) -> Exchange:
    return assemble(raw(number), Turns())


@pytest.mark.parametrize(
    ("room", "yields", "kept"), [(100, 3, 20), (16, 2, 16), (9, 2, 9), (1, 1, 1), (0, 0, 0)]
)
def test_the_outbox_yields_after_every_eight_rows_that_it_writes(
    room: int, yields: int, kept: int, tmp_path: Path
) -> None:
    assert ROWS_AT_ONCE == 8
    yielded: list[None] = []
    path = tmp_path / "outbox.db"
    outbox = Outbox(path, max_rows=room, yield_cpu=lambda: yielded.append(None))

    assert outbox.write([exchange(number) for number in range(20)]) == kept

    assert len(yielded) == yields
    outbox.close()
    reader = OutboxReader(path)
    names = [row.exchange_id for row in reader.read(0, 100)]
    reader.close()
    assert names == [f"ex_{number}" for number in range(kept)]


def test_a_batch_is_seen_whole_or_not_at_all_however_often_its_writer_yields(
    tmp_path: Path,
) -> None:
    path = tmp_path / "outbox.db"
    reader = OutboxReader(path)
    seen: list[int] = []
    outbox = Outbox(path, max_rows=100, yield_cpu=lambda: seen.append(reader.count()))

    outbox.write([exchange(number) for number in range(20)])
    outbox.write([exchange(number) for number in range(20, 30)])

    assert seen == [0, 0, 0, 20, 20]
    assert reader.count() == 30
    reader.close()
    outbox.close()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 12)), max_size=40))
def test_what_the_reply_buffers_hold_is_what_is_counted(steps: list[tuple[int, int]]) -> None:
    """Bytes to add; -1 takes, -2 clears. 10 for one reply, 20 for all three."""
    held = HeldBytes(max_reply=10, max_pending=20)
    buffers = [ReplyBuffer(held) for _ in range(3)]
    kept: list[list[bytes]] = [[] for _ in buffers]

    for which, size in steps:
        reply_buffer, mine = buffers[which], kept[which]
        if size < 0:
            if size == -1:
                assert reply_buffer.take() == tuple(mine)
            else:
                reply_buffer.clear()
            mine.clear()
            continue
        others = sum(len(piece) for pieces in kept for piece in pieces)
        whole = sum(map(len, mine)) + size
        was_lost = reply_buffer.lost_reason
        reply_buffer.add(b"x" * size)
        if was_lost is None and whole <= 10 and others + size <= 20:
            assert reply_buffer.lost_reason is None
            mine.append(b"x" * size)
        elif was_lost is None:
            assert reply_buffer.lost_reason == ("reply_too_long" if whole > 10 else "memory_full")
            mine.clear()
        assert held.buffered == held.now == sum(len(piece) for pieces in kept for piece in pieces)
        assert reply_buffer.size == sum(map(len, mine))
