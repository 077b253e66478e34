"""Keep what the relay saw, off the path: a bounded queue, one thread, a sink.

The relay never waits for any of it. What does not fit is dropped, the newest first, and counted by
reason: for every chat request exactly one of kept, lost and skipped grows by one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from sidecar.assemble import RawCapture, assemble
from sidecar.errors import OutboxError
from sidecar.metrics import Metrics
from sidecar.records import Exchange
from sidecar.settings import Capture as CaptureSettings
from sidecar.spans import RequestSpans, trace_id

log = structlog.get_logger()
BATCH = 500
"""Exchanges in one transaction of the sink."""


class ExchangeSink(Protocol):
    """Where exchanges go. Called from the capture's thread only."""

    def write(self, exchanges: Sequence[Exchange]) -> int:
        """Store a batch. Returns how many were stored, from the front: fewer than came when it is
        full. Raises: OutboxError when none was."""

    def close(self) -> None: ...


class Tee:
    """The chunks of one reply, kept by reference while it passes. Belongs to the relay's thread."""

    __slots__ = ("_capture", "_chunks", "_size", "lost_reason")

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._chunks: list[bytes] = []
        self._size = 0
        self.lost_reason: str | None = None

    def add(self, chunk: bytes) -> None:
        if self.lost_reason is not None:
            return
        reason = self._capture.refuse(self._size + len(chunk), len(chunk))
        if reason is not None:
            self.clear()
            self.lost_reason = reason
            return
        self._size += len(chunk)
        self._chunks.append(chunk)

    def clear(self) -> None:
        """Forget everything: the reply is too long, or another one takes its place."""
        self._capture.release(self._size)
        self._size = 0
        self._chunks = []

    def take(self) -> tuple[bytes, ...]:
        chunks = tuple(self._chunks)
        self.clear()
        return chunks


class Capture:
    """The queue and its thread. `start` it, `offer` to it, `stop` it."""

    def __init__(
        self, settings: CaptureSettings, sink: ExchangeSink, metrics: Metrics, spans: RequestSpans
    ) -> None:
        self._settings = settings
        self._sink = sink
        self._metrics = metrics
        self._spans = spans
        self._lock = threading.Lock()
        self._queue: deque[RawCapture] = deque()
        self._queued_bytes = 0
        self._unlogged: Counter[str] = Counter()
        self._teed_bytes = 0  # of replies still passing; the relay's thread alone changes it
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    # -- the relay's side: never blocks, never raises

    def tee(self) -> Tee:
        return Tee(self)

    def refuse(self, reply_bytes: int, more: int) -> str | None:
        """Why `more` bytes of a reply cannot be kept; None when they can, and are counted."""
        if reply_bytes > self._settings.max_reply_bytes:
            return "reply_too_long"
        if self._teed_bytes + self._queued_bytes + more > self._settings.max_pending_bytes:
            return "memory_full"
        self._teed_bytes += more
        return None

    def release(self, size: int) -> None:
        self._teed_bytes -= size

    def offer(self, raw: RawCapture) -> None:
        """Hand over a finished request. Dropped and counted when the queue is full."""
        size = raw.size
        with self._lock:
            full = len(self._queue) >= self._settings.max_pending
            fat = self._queued_bytes + self._teed_bytes + size > self._settings.max_pending_bytes
            if not (full or fat):
                self._queue.append(raw)
                self._queued_bytes += size
        if (full or fat) and raw.reply is not None:
            self.lose("queue_full" if full else "memory_full", 1)

    def lose(self, reason: str, count: int) -> None:
        """Count captures that are lost. The thread logs them: a log line may block."""
        self._metrics.captures_lost.labels(reason).inc(count)
        with self._lock:
            self._unlogged[reason] += count

    # -- the thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what is queued and end. False: it did not within `timeout_s`; the rest is lost."""
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.flush_interval_s):
            self._flush()
            self._log_losses()
        self._flush()
        self._log_losses()
        self._sink.close()

    def _flush(self) -> None:
        while True:
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            if not batch:
                return
            try:
                self._write([read for raw in batch if (read := self._read(raw)) is not None])
            finally:
                # Only now: what is being written is still in memory.
                with self._lock:
                    self._queued_bytes -= sum(raw.size for raw in batch)
                    self._metrics.capture_pending_bytes.set(self._queued_bytes + self._teed_bytes)

    def _log_losses(self) -> None:
        with self._lock:
            losses, self._unlogged = self._unlogged, Counter()
        for reason, count in losses.items():
            log.warning("captures_lost", reason=reason, count=count)

    def _read(self, raw: RawCapture) -> Exchange | None:
        began = time.time()
        try:
            if raw.reply is None:
                self._spans.request(raw, None)
                return None
            exchange = assemble(raw)
            span = self._spans.request(raw, exchange)
            exchange = replace(exchange, trace_id=trace_id(span))
            self._spans.capture(span, exchange, began=began, ended=time.time())
        except Exception:  # a capture that shows a defect of ours must not end all captures
            log.exception("capture_unreadable", exchange_id=raw.exchange_id)
            self.lose("unreadable", 1)
            return None
        if exchange.untrainable_reason is not None:
            self._metrics.untrainable.labels(exchange.untrainable_reason).inc()
        if exchange.untrainable_reason == "model_mismatch":
            self._metrics.model_mismatch.inc()
            log.error("model_mismatch", exchange_id=exchange.exchange_id, adapter=exchange.adapter)
        return exchange

    def _write(self, exchanges: list[Exchange]) -> None:
        if not exchanges:
            return
        try:
            kept = self._sink.write(exchanges)
        except OutboxError as error:
            self.lose(error.reason, len(exchanges))
            log.warning("outbox_refused", reason=error.reason, error=str(error))
            return
        self._metrics.captures_kept.inc(kept)
        if kept < len(exchanges):
            self.lose("outbox_full", len(exchanges) - kept)
