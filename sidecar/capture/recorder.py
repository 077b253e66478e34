"""Record finished requests off the request path: a bounded queue, one thread, a sink.

The relay never waits for the recorder. A capture that does not fit is dropped, the newest first,
and counted by reason: for every request to a captured surface exactly one of the counters kept,
lost and skipped grows by one.

The thread shares the interpreter with the relay. Python can switch threads between any two of its
instructions, so only the length of a single call into C matters: streams are parsed in runs of at
most 64 kB, and batches are limited in bytes as well as in number. If the thread also shares a CPU
core with the relay, `CooperativeYield` limits how long it works at a stretch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from sidecar.bounds import bound
from sidecar.capture.assemble import Turns, assemble
from sidecar.capture.reply_buffer import HeldBytes, ReplyBuffer
from sidecar.errors import OutboxError, UnstorableError
from sidecar.metrics.proxy import Metrics
from sidecar.records import Exchange, RawCapture
from sidecar.tracing.spans import RequestSpans, trace_id

# Cooperative yielding for a thread that shares a CPU core and the interpreter with the relay.

WORK_S = 300e-6
"""Longest stretch of work, in seconds. Shorter stretches cost more than they save, because both
threads find cold caches after each switch: with 100 us a capture takes 1.5 times the CPU time."""
PAUSE_S = 20e-6
"""Requested length of a pause, in seconds. Linux's timer slack makes it at least 70 us."""


CooperativeYield = Callable[[], None]
"""Called between two steps of work; pauses when the stretch of work was long enough."""


def never_yield() -> None:
    """Never pause: for a thread that shares its core with no relay."""


class Yielding:
    """Pauses for `PAUSE_S` after each `WORK_S` of work. For one thread."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        if time.perf_counter() - self._since >= WORK_S:
            time.sleep(PAUSE_S)
            self._since = time.perf_counter()


log = structlog.get_logger()
BATCH = 64
"""Exchanges in one transaction of the sink. A commit of this size cannot be interrupted and takes a
quarter of a millisecond."""
BATCH_BYTES = 2**19
"""Captured bytes in one transaction; a single capture may be larger."""
EARLY = 256
"""With this many captures in the queue, or a full queue, the thread does not wait for the flush
interval to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may wait in memory, and for how long."""

    max_pending: int = 8_000
    """Finished requests that wait to be written; beyond, the newest is lost (`queue_full`)."""
    max_pending_bytes: int = 64 * 2**20
    """Bytes of requests and replies in memory; beyond, the newest is lost (`memory_full`)."""
    max_reply_bytes: int = 8 * 2**20
    """A longer reply is relayed and not recorded."""
    flush_interval_s: float = 0.1
    """SIGKILL of the proxy loses at most what came in this long."""


LIMITS = Limits()
STOPPED = "stopped"
"""The reason that is counted for captures not written before the time limit of `stop`."""


class ExchangeSink(Protocol):
    """Stores exchanges. Called from the recorder's thread only."""

    def write(self, exchanges: Sequence[Exchange]) -> int:
        """Store a batch and return how many exchanges were stored, from the front of the batch;
        fewer when the sink is full. Raises: OutboxError when none was stored."""

    def close(self) -> None: ...


class Capture:
    """The capture queue and its thread: `start`, then `offer` captures, then `stop`."""

    def __init__(
        self,
        limits: Limits,
        sink: ExchangeSink,
        metrics: Metrics,
        spans: RequestSpans | None,
        yield_cpu: CooperativeYield = never_yield,
    ) -> None:
        """spans: None when no exporter is configured; no spans are made then.
        yield_cpu: the thread calls it between two captures to yield the CPU."""
        self._limits = limits
        self._sink = sink
        self._metrics = metrics
        self._spans = spans
        self._yield_cpu = yield_cpu
        self._turns = Turns()
        self._queue: deque[tuple[RawCapture, int]] = deque()
        """Captures with their sizes in bytes."""
        self.held = HeldBytes(
            max_reply=limits.max_reply_bytes, max_pending=limits.max_pending_bytes
        )
        self._enough = min(EARLY, limits.max_pending)
        self._lock = threading.Lock()  # of all below
        self._unlogged: Counter[str] = Counter()
        self._in_hand = 0
        """Captures taken from the queue and not yet counted as kept or lost."""
        self._abandoned = False
        self._stopping = threading.Event()
        self._work = threading.Event()
        self._asleep = False
        """The thread waits for a first capture; `offer` must wake it."""
        self._waiting = False
        """The thread waits for a full batch; `offer` must wake it when there is one."""
        self._hurry = False
        """A capture was dropped while others wait, so waiting longer would lose more. It stays set
        until the thread reads it, because a thread that was woken may not have run yet."""
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    # -- called by the relay's thread; never blocks, never raises

    @property
    def traced(self) -> bool:
        """True if spans are made, so that requests which are not recorded are offered too."""
        return self._spans is not None

    def reply_buffer(self) -> ReplyBuffer:
        return ReplyBuffer(self.held)

    def offer(self, raw: RawCapture) -> None:
        """Queue a finished request. When the queue is full the request is dropped and counted."""
        wanted = raw.reply is not None
        if not wanted and self._spans is None:
            return
        size = raw.size
        if len(self._queue) >= self._limits.max_pending:
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
            self._hurry = True  # set before `_waiting` is read, or the thread could miss it
            if self._waiting:
                self._wake()
        if wanted:
            self.lose(reason, 1)

    def lose(self, reason: str, count: int) -> None:
        """Count lost captures. The thread logs one line an interval, because a log line may
        block."""
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
        """Write all queued captures and end the thread. Returns: False when that took longer than
        `timeout_s`. Captures not written by then are counted as lost, although the batch being
        written may still reach the sink."""
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
        """Sleep until a capture is queued, then until a batch is full or the interval is over.
        Polling ten times a second would cost an idle proxy a hundredth of its CPU time."""
        self._work.clear()
        self._asleep = True  # set before the queue is read: a later capture wakes the thread
        if not self._queue and not self._unlogged and not self._stopping.is_set():
            self._work.wait()
        self._asleep = False
        self._work.clear()
        self._waiting = True  # set before the queue is read, as above
        enough = self._hurry or len(self._queue) >= self._enough
        if not enough and not self._stopping.is_set():
            self._work.wait(self._limits.flush_interval_s)
        self._waiting = False
        self._hurry = False

    def _flush(self) -> None:
        while batch := self._take():
            try:
                self._write(self._read_all([raw for raw, _ in batch]))
            finally:
                # Only now, because a batch being written is still in memory.
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
            # A long queue has priority over the relay.
            if len(self._queue) < self._limits.max_pending // 2:
                self._yield_cpu()
            try:
                exchange = self._read(raw)
                if exchange is not None:
                    exchange, bounded = bound(exchange)
                    for reason in bounded:
                        self._metrics.captures_bounded.labels(reason).inc()
            except UnstorableError as error:
                self._account(0, "unstorable", 1)
                log.error("capture_unstorable", exchange_id=raw.exchange_id, why=str(error))
                continue
            except Exception as error:  # noqa: BLE001 - a defect on one capture must not end the thread
                unreadable += 1
                if unreadable == 1:  # one log line costs more than the rest of the batch
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
        except Exception as error:  # noqa: BLE001 - as above, e.g. a number too large for msgpack
            if len(exchanges) > 1:  # write one by one to find it
                for exchange in exchanges:
                    self._write([exchange])
                return
            self._log_defect("capture_unwritable", exchanges[0].exchange_id, error)
            self._account(0, "unwritable", 1)
            return
        self._account(kept, "outbox_full", len(exchanges) - kept)

    def _account(self, kept: int, reason: str, lost: int) -> None:
        """Count captures taken from the queue, unless a `stop` that timed out has counted them."""
        with self._lock:
            if self._abandoned:
                return
            self._in_hand -= kept + lost
        self._metrics.captures_kept.inc(kept)
        if lost:
            self.lose(reason, lost)

    @staticmethod
    def _log_defect(event: str, exchange_id: str, error: Exception) -> None:
        """Log where an error was raised, without its message, which may quote what users wrote."""
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
