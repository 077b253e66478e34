"""Keep what the relay saw, off the path: a bounded queue, one thread, a sink.

The relay never waits for any of it. What does not fit is dropped, the newest first, and counted by
reason: for every request to a captured surface exactly one of kept, lost and skipped grows by one.

The thread shares the interpreter with the relay. It lets go of it between any two steps of Python,
so what matters is how long one call into C may take: replies of any length are read event by event
and put together in blocks of 64 kB, and batches are cut by bytes as well as by count.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from sidecar.assemble import RawCapture, assemble
from sidecar.errors import OutboxError
from sidecar.metrics import Metrics
from sidecar.records import Exchange
from sidecar.settings import Capture as CaptureSettings
from sidecar.spans import RequestSpans, trace_id
from sidecar.turns import Turns

log = structlog.get_logger()
BATCH = 500
"""Exchanges in one transaction of the sink."""
BATCH_BYTES = 4 * 2**20
"""Captured bytes in one transaction; a single capture may be larger."""
STOPPED = "stopped"
"""Why captures are lost that were not written within the time that a stop may take."""


class ExchangeSink(Protocol):
    """Where exchanges go. Called from the capture's thread only."""

    def write(self, exchanges: Sequence[Exchange]) -> int:
        """Store a batch. Returns how many were stored, from the front: fewer than came when it is
        full. Raises: OutboxError when none was."""

    def close(self) -> None: ...


class Tee:
    """The chunks of one reply, kept by reference while it passes. Belongs to the relay's thread."""

    __slots__ = ("_capture", "_chunks", "lost_reason", "size")

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._chunks: list[bytes] = []
        self.size = 0
        """Bytes that it holds; read it before `take`, for `RawCapture.reply_bytes`."""
        self.lost_reason: str | None = None

    def add(self, chunk: bytes) -> None:
        if self.lost_reason is not None:
            return
        length = len(chunk)
        reason = self._capture.refuse(self.size + length, length)
        if reason is not None:
            self.clear()
            self.lost_reason = reason
            return
        self.size += length
        self._chunks.append(chunk)

    def clear(self) -> None:
        """Forget everything: the reply is too long, or another one takes its place."""
        self._capture.release(self.size)
        self.size = 0
        self._chunks = []

    def take(self) -> tuple[bytes, ...]:
        chunks = tuple(self._chunks)
        self.clear()
        return chunks


class Capture:
    """The queue and its thread. `start` it, `offer` to it, `stop` it."""

    def __init__(
        self,
        settings: CaptureSettings,
        sink: ExchangeSink,
        metrics: Metrics,
        spans: RequestSpans | None,
    ) -> None:
        """spans: None when nothing exports them; then none is made."""
        self._settings = settings
        self._sink = sink
        self._metrics = metrics
        self._spans = spans
        self._turns = Turns()
        self._queue: deque[tuple[RawCapture, int]] = deque()
        # Each of these three has one writing thread, so that the relay's side takes no lock.
        self._teed_bytes = 0  # of replies still passing; the relay's
        self._offered_bytes = 0  # ever; the relay's
        self._done_bytes = 0  # ever; the capture's
        self._lock = threading.Lock()  # of all below
        self._unlogged: Counter[str] = Counter()
        self._in_hand = 0
        """Captures that were taken from the queue and are not accounted for yet."""
        self._abandoned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    # -- the relay's side: one thread; never blocks, never raises

    @property
    def traced(self) -> bool:
        """Whether a request that is not recorded is of any use here: a span is made of it."""
        return self._spans is not None

    def tee(self) -> Tee:
        return Tee(self)

    def refuse(self, reply_bytes: int, more: int) -> str | None:
        """Why `more` bytes of a reply cannot be kept; None when they can, and are counted."""
        if reply_bytes > self._settings.max_reply_bytes:
            return "reply_too_long"
        if self._held_bytes + more > self._settings.max_pending_bytes:
            return "memory_full"
        self._teed_bytes += more
        return None

    def release(self, size: int) -> None:
        self._teed_bytes -= size

    @property
    def _held_bytes(self) -> int:
        return self._teed_bytes + self._offered_bytes - self._done_bytes

    def offer(self, raw: RawCapture) -> None:
        """Hand over a finished request. Dropped and counted when the queue is full."""
        wanted = raw.reply is not None
        if not wanted and self._spans is None:
            return
        size = raw.size
        if len(self._queue) >= self._settings.max_pending:
            reason = "queue_full"
        elif self._held_bytes + size > self._settings.max_pending_bytes:
            reason = "memory_full"
        elif self._abandoned:
            reason = STOPPED
        else:
            self._offered_bytes += size
            self._queue.append((raw, size))
            return
        if wanted:
            self.lose(reason, 1)

    def lose(self, reason: str, count: int) -> None:
        """Count captures that are lost. The thread logs them: a log line may block."""
        self._metrics.captures_lost.labels(reason).inc(count)
        with self._lock:
            self._unlogged[reason] += count

    # -- the thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what is queued and end. False: it did not within `timeout_s`; what is not written
        by then is counted as lost, though the batch that is being written may still arrive."""
        self._stopping.set()
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
        while not self._stopping.wait(self._settings.flush_interval_s):
            self._flush()
            self._log_losses()
        self._flush()
        self._log_losses()
        self._sink.close()

    def _flush(self) -> None:
        while batch := self._take():
            try:
                self._write(self._read_all([raw for raw, _ in batch]))
            finally:
                # Only now: what is being written is still in memory.
                self._done_bytes += sum([size for _, size in batch])
                self._metrics.capture_pending_bytes.set(self._held_bytes)

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
