"""Keep what the relay saw, off the path: a bounded queue, one thread, a sink.

The relay never waits for any of it. What does not fit is dropped, the newest first, and counted by
reason: for every request to a captured surface exactly one of kept, lost and skipped grows by one.

The thread shares the interpreter with the relay. It lets go of it between any two steps of Python,
so what matters is how long one call into C may take: streams are read in runs of 64 kB at most, and
batches are cut by bytes as well as by count. It shares the core too, perhaps: see `rests.py`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from sidecar.capture.assemble import assemble
from sidecar.capture.reply_buffer import HeldBytes, ReplyBuffer
from sidecar.capture.turns import Turns
from sidecar.capture.yielding import Rest, never
from sidecar.errors import OutboxError
from sidecar.metrics.proxy import Metrics
from sidecar.records import Exchange, RawCapture
from sidecar.settings import Capture as CaptureSettings
from sidecar.tracing.spans import RequestSpans, trace_id

log = structlog.get_logger()
BATCH = 64
"""Exchanges in one transaction of the sink: the end of one is a stretch of work that nothing
interrupts (a quarter of a millisecond)."""
BATCH_BYTES = 2**19
"""Captured bytes in one transaction; a single capture may be larger."""
EARLY = 256
"""So many captures do not wait for the interval to end; a full queue does not either."""
STOPPED = "stopped"
"""Why captures are lost that were not written within the time that a stop may take."""


class ExchangeSink(Protocol):
    """Where exchanges go. Called from the capture's thread only."""

    def write(self, exchanges: Sequence[Exchange]) -> int:
        """Store a batch. Returns how many were stored, from the front: fewer than came when it is
        full. Raises: OutboxError when none was."""

    def close(self) -> None: ...


class Capture:
    """The queue and its thread. `start` it, `offer` to it, `stop` it."""

    def __init__(
        self,
        settings: CaptureSettings,
        sink: ExchangeSink,
        metrics: Metrics,
        spans: RequestSpans | None,
        rest: Rest = never,
    ) -> None:
        """spans: None when nothing exports them; then none is made.
        rest: called by the thread between two captures."""
        self._settings = settings
        self._sink = sink
        self._metrics = metrics
        self._spans = spans
        self._rest = rest
        self._turns = Turns()
        self._queue: deque[tuple[RawCapture, int]] = deque()
        self.held = HeldBytes(
            max_reply=settings.max_reply_bytes, max_pending=settings.max_pending_bytes
        )
        self._max_pending = settings.max_pending
        self._enough = min(EARLY, settings.max_pending)
        self._lock = threading.Lock()  # of all below
        self._unlogged: Counter[str] = Counter()
        self._in_hand = 0
        """Captures that were taken from the queue and are not accounted for yet."""
        self._abandoned = False
        self._stopping = threading.Event()
        self._work = threading.Event()
        self._asleep = False
        """The thread waits for work, and must be told when there is some."""
        self._waiting = False
        """It waits for more of it, and must be told when there is enough."""
        self._hurry = False
        """A capture was dropped while others wait: to wait for more would lose more. It stays set
        until the thread has seen it, which may not have run since it was woken."""
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    # -- the relay's side: one thread; never blocks, never raises

    @property
    def traced(self) -> bool:
        """Whether a request that is not recorded is of any use here: a span is made of it."""
        return self._spans is not None

    def reply_buffer(self) -> ReplyBuffer:
        return ReplyBuffer(self.held)

    def offer(self, raw: RawCapture) -> None:
        """Hand over a finished request. Dropped and counted when the queue is full."""
        wanted = raw.reply is not None
        if not wanted and self._spans is None:
            return
        size = raw.size
        if len(self._queue) >= self._max_pending:
            reason = "queue_full"
        elif not self.held.has_room(size):
            reason = "memory_full"
        elif self._abandoned:
            reason = STOPPED
        else:
            self.held.offered += size
            self._queue.append((raw, size))
            if self._asleep or (self._waiting and len(self._queue) >= self._enough):
                self._wake()
            return
        if self._queue:
            self._hurry = True  # before the look whether the thread waits
            if self._waiting:
                self._wake()
        if wanted:
            self.lose(reason, 1)

    def lose(self, reason: str, count: int) -> None:
        """Count captures that are lost. The thread logs them, all of an interval in one line: a log
        line may block."""
        self._metrics.captures_lost.labels(reason).inc(count)
        with self._lock:
            self._unlogged[reason] += count
        if self._asleep:
            self._wake()

    def _wake(self) -> None:
        self._asleep = self._waiting = False
        self._work.set()

    # -- the thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what is queued and end. False: it did not within `timeout_s`; what is not written
        by then is counted as lost, though the batch that is being written may still arrive."""
        self._stopping.set()
        self._wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        with self._lock:
            self._abandoned = True
            lost = self._in_hand + sum(raw.reply is not None for raw, _ in self._queue)
            self._in_hand = 0
            self._queue.clear()
        if lost:
            self.lose(STOPPED, lost)
        self._log_losses()
        return False

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._await_work()
            self._flush()
            self._log_losses()
        self._flush()
        self._log_losses()
        self._sink.close()

    def _await_work(self) -> None:
        """Sleep until there is some, then until there is enough or the interval is over. (To look
        ten times a second would cost a proxy that captures nothing a hundredth of all it does.)"""
        self._work.clear()
        self._asleep = True  # before the look: what comes after it wakes us
        if not self._queue and not self._unlogged and not self._stopping.is_set():
            self._work.wait()
        self._asleep = False
        self._work.clear()
        self._waiting = True  # before the look, as above
        enough = self._hurry or len(self._queue) >= self._enough
        if not enough and not self._stopping.is_set():
            self._work.wait(self._settings.flush_interval_s)
        self._waiting = False
        self._hurry = False

    def _flush(self) -> None:
        while batch := self._take():
            try:
                self._write(self._read_all([raw for raw, _ in batch]))
            finally:
                # Only now: what is being written is still in memory.
                self.held.done += sum([size for _, size in batch])
                self._metrics.capture_pending_bytes.set(self.held.now)

    def _take(self) -> list[tuple[RawCapture, int]]:
        batch: list[tuple[RawCapture, int]] = []
        size = 0
        with self._lock:
            while self._queue and len(batch) < BATCH and size < BATCH_BYTES:
                batch.append(self._queue.popleft())
                size += batch[-1][1]
            self._in_hand = sum([raw.reply is not None for raw, _ in batch])
        return batch

    def _read_all(self, batch: Sequence[RawCapture]) -> list[Exchange]:
        exchanges: list[Exchange] = []
        unreadable = 0
        untrainable: Counter[str] = Counter()
        mismatch: Exchange | None = None
        for raw in batch:
            if len(self._queue) < self._max_pending // 2:  # else to keep up matters more
                self._rest()
            try:
                exchange = self._read(raw)
            except Exception as error:  # noqa: BLE001 - one that shows a defect must not end all
                unreadable += 1
                if unreadable == 1:  # a log line costs more than all the rest
                    self._log_defect("capture_unreadable", raw.exchange_id, error)
                continue
            if exchange is None:
                continue
            exchanges.append(exchange)
            if exchange.untrainable_reason is not None:
                untrainable[exchange.untrainable_reason] += 1
                if exchange.untrainable_reason == "model_mismatch":
                    mismatch = mismatch or exchange
        for reason, count in untrainable.items():
            self._metrics.untrainable.labels(reason).inc(count)
        if mismatch is not None:
            count = untrainable["model_mismatch"]
            self._metrics.model_mismatch.inc(count)
            log.error(
                "model_mismatch",
                exchange_id=mismatch.exchange_id,
                adapter=mismatch.adapter,
                count=count,
            )
        if unreadable:
            self._account(0, "unreadable", unreadable)
        return exchanges

    def _read(self, raw: RawCapture) -> Exchange | None:
        spans = self._spans
        if spans is None:
            return None if raw.reply is None else assemble(raw, self._turns)
        if raw.reply is None:
            spans.request(raw, None)
            return None
        began = time.time()
        exchange = assemble(raw, self._turns)
        span = spans.request(raw, exchange)
        exchange = msgspec.structs.replace(exchange, trace_id=trace_id(span))
        spans.capture(span, exchange, began=began, ended=time.time())
        return exchange

    def _write(self, exchanges: list[Exchange]) -> None:
        if not exchanges:
            return
        try:
            kept = self._sink.write(exchanges)
        except OutboxError as error:
            self._account(0, error.reason, len(exchanges))
            log.warning("outbox_refused", reason=error.reason, error=str(error))
            return
        except Exception as error:  # noqa: BLE001 - as above: a number that msgpack has no room for
            if len(exchanges) > 1:  # find it
                for exchange in exchanges:
                    self._write([exchange])
                return
            self._log_defect("capture_unwritable", exchanges[0].exchange_id, error)
            self._account(0, "unwritable", 1)
            return
        self._account(kept, "outbox_full", len(exchanges) - kept)

    def _account(self, kept: int, reason: str, lost: int) -> None:
        """Count captures that are in hand, once: a stop that did not wait has counted them."""
        with self._lock:
            if self._abandoned:
                return
            self._in_hand -= kept + lost
        self._metrics.captures_kept.inc(kept)
        if lost:
            self.lose(reason, lost)

    @staticmethod
    def _log_defect(event: str, exchange_id: str, error: Exception) -> None:
        """Where it happened, and nothing of what users wrote: messages of errors can hold it."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
        log.error(event, exchange_id=exchange_id, error=type(error).__name__, where=where)

    def _log_losses(self) -> None:
        with self._lock:
            losses, self._unlogged = self._unlogged, Counter()
        for reason, count in losses.items():
            log.warning("captures_lost", reason=reason, count=count)
