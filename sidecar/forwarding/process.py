"""The process that moves records from the outbox to Kafka, and what it reports.

A record leaves the outbox only when all in-sync replicas have it, or when it has been set aside
because the topic can never hold it. So nothing is lost when this process, the brokers or the
machine die, and a record may come twice; the store takes it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from sidecar.backoff import Backoff, Waits
from sidecar.capture.outbox import OutboxReader, OutboxRow
from sidecar.errors import ForwardingError, OutboxError, StateLockError
from sidecar.feedback import decode_feedback, is_feedback
from sidecar.forwarding.sender import DeadLetters, Failure, Record, Sender
from sidecar.metrics.proxy import ForwardingMetrics
from sidecar.parent_death import guarded_command
from sidecar.processes import only_one, own_environment, own_python
from sidecar.records import decode_exchange
from sidecar.settings import KafkaUrl, Settings, read_bus_url
from sidecar.store.keyring import BUS, NO_KEYS, Keyring

# What the forwarding process tells the proxy: counts, one JSON line a second on a pipe.

log = structlog.get_logger()
INTERVAL_S = 1.0


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts since the last report, and the present state."""

    forwarded: int = 0
    set_aside: dict[str, int] = {}
    failures: dict[str, int] = {}
    expired: int = 0
    """Records that were set aside and deleted because of their age."""
    waiting: int | None = None
    """Records in the outbox; None when it cannot be read."""
    reachable: bool = True
    """False since an attempt failed, until one succeeds."""


class Tally:
    """Counts for the next report. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forwarded = 0
        self._set_aside: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._expired = 0
        self._reachable = True

    def forwarded(self, count: int) -> None:
        with self._lock:
            self._forwarded += count

    def set_aside(self, reason: str) -> None:
        with self._lock:
            self._set_aside[reason] += 1

    def expired(self, count: int) -> None:
        with self._lock:
            self._expired += count

    def failed(self, reason: str) -> None:
        """Note an attempt that failed."""
        with self._lock:
            self._failures[reason] += 1
            self._reachable = False

    def worked(self) -> None:
        """Note an attempt that succeeded."""
        with self._lock:
            self._reachable = True

    def take(self, waiting: int | None) -> Report:
        """Return the report, and begin the next one."""
        with self._lock:
            report = Report(
                forwarded=self._forwarded,
                set_aside=dict(self._set_aside),
                failures=dict(self._failures),
                expired=self._expired,
                waiting=waiting,
                reachable=self._reachable,
            )
            self._forwarded = self._expired = 0
            self._set_aside.clear()
            self._failures.clear()
        return report


class Reporter:
    """A thread that writes a report every second: `start`, then `stop`.

    Forwarding waits for brokers, and the number of waiting records must be seen to grow meanwhile.
    """

    def __init__(self, tally: Tally, count_waiting: Callable[[], int], pipe: Any) -> None:
        """pipe: a binary file; Any because of its many types."""
        self._tally, self._count, self._pipe = tally, count_waiting, pipe
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write the last report, and end."""
        self._stopping.set()
        self._thread.join(INTERVAL_S)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self._write()
        self._write()

    def _write(self) -> None:
        try:
            waiting: int | None = self._count()
        except OutboxError as error:
            log.warning("outbox_not_counted", error=str(error))
            waiting = None
        try:
            self._pipe.write(msgspec.json.encode(self._tally.take(waiting)) + b"\n")
            self._pipe.flush()
        except OSError as error:  # the proxy has died; this process ends with it
            log.warning("report_not_written", why=str(error))
            self._stopping.set()


# The forwarding process as the proxy sees it: start it, read its counts, end it.

RESTARTS = Backoff(first_s=0.5, last_s=30.0)
STOP_S = 8.0
"""How long it may take to end: `__main__.DRAIN_S`, and what a batch under way takes. Killed then,
which loses nothing."""


AWAY_STOP_S = 1.0
"""The same while the brokers are away: they would not take more in a longer time."""


class ForwardingProcess:
    """`start`, then `stop`. For one event loop, which only reads a line a second."""

    def __init__(self, config: Path | None, metrics: ForwardingMetrics) -> None:
        """config: the settings file of this process; None: the default one."""
        self._config = config
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._reachable = True

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())
        self._task.add_done_callback(_note_end)

    async def stop(self) -> None:
        """Let it forward what the outbox holds, for a few seconds, and end it."""
        self._stopping = True
        task, self._task = self._task, None
        if task is None:
            return
        if self._process is None:  # it waits to be started again
            task.cancel()
        else:
            self._signal(signal.SIGTERM)
        timeout_s = STOP_S if self._reachable else AWAY_STOP_S
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            log.warning("forwarder_killed", why="it did not end in time; nothing is lost")
            self._signal(signal.SIGKILL)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _keep(self) -> None:
        waits = Waits(RESTARTS)
        while not self._stopping:
            began = time.monotonic()
            try:
                code: int | str = await self._live()
            except OSError as error:  # no memory or no process left
                code = str(error)
            if self._stopping:
                return
            self._metrics.restarts.inc()
            self._metrics.reachable.set(0.0)
            wait_s = waits.restart_s(time.monotonic() - began)
            log.error("forwarder_ended", code=code, again_in_s=wait_s)
            await asyncio.sleep(wait_s)

    async def _live(self) -> int:
        """Start the process and read its reports until it ends. Returns: its exit code."""
        config = ("--config", str(self._config)) if self._config is not None else ()
        self._process = await asyncio.create_subprocess_exec(
            *guarded_command(),  # a proxy that is killed takes it along
            *own_python("sidecar.forwarding", *config),
            env=own_environment(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal is for the proxy, which ends it after its own last captures.
            start_new_session=True,
        )
        try:
            if self._stopping:
                self._signal(signal.SIGTERM)
            assert self._process.stdout is not None
            while line := await self._process.stdout.readline():
                self._note(line)
            return await self._process.wait()
        finally:
            self._process = None

    def _note(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.MsgspecError as error:
            log.error("forwarder_report_unreadable", why=str(error))
            return
        metrics = self._metrics
        metrics.forwarded.inc(report.forwarded)
        metrics.expired.inc(report.expired)
        for reason, count in report.failures.items():
            metrics.failures.labels(reason).inc(count)
        for reason, count in report.set_aside.items():
            metrics.set_aside.labels(reason).inc(count)
        if report.waiting is not None:
            metrics.waiting.set(float(report.waiting))
        self._reachable = report.reachable
        metrics.reachable.set(float(report.reachable))


def _note_end(task: asyncio.Task[None]) -> None:
    """A defect here must not stay unseen: records would wait, and nobody would know why."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("forwarder_unwatched", exc_info=error)


def forwarding_process(
    settings: Settings, config: Path | None, metrics: ForwardingMetrics
) -> ForwardingProcess | None:
    """Return the process to start; None with the embedded bus."""
    if not isinstance(read_bus_url(settings.bus.url), KafkaUrl):
        return None
    return ForwardingProcess(config, metrics)


ROWS = 500
BYTES = 4 * 2**20
"""Records and payload bytes in one round; a single record may be larger."""
PartitionBy = Literal["caller", "session"]


class Forwarder:
    """`step` it until it returns 0."""

    def __init__(
        self,
        outbox: OutboxReader,
        open_sender: Callable[[], Sender],
        dead_letters: DeadLetters,
        tally: Tally,
        *,
        partition_by: PartitionBy,
        keyring: Keyring = NO_KEYS,
    ) -> None:
        """open_sender: connects; raises ForwardingError when the brokers are away.
        keyring: reads encrypted records, to choose their partition; they stay encrypted."""
        self._keyring = keyring
        self._outbox = outbox
        self._open_sender = open_sender
        self._dead_letters = dead_letters
        self._tally = tally
        self._partition_by = partition_by
        self._sender: Sender | None = None
        self._done: set[str] = set()
        """Exchanges that are on the topic, behind one in the outbox that is not."""

    def step(self) -> int:
        """Forward one round of records.

        Returns: how many left the outbox; 0 when it is empty.
        Raises: OutboxError, or ForwardingError when a record could not be sent. Those before it
        have left the outbox, and those behind it are not sent again by this process.
        """
        rows = self._outbox.read(0, ROWS, BYTES)
        if not rows:
            return 0
        self._done &= {row.exchange_id for row in rows}
        failure = self._send([row for row in rows if row.exchange_id not in self._done])
        gone = 0
        for row in rows:
            if row.exchange_id not in self._done:
                break
            gone += 1
        if gone:
            self._outbox.delete_through(rows[gone - 1].seq)
            self._done -= {row.exchange_id for row in rows[:gone]}
        if failure is not None:
            self.close()  # its state is not known, and a new one asks for the brokers anew
            raise ForwardingError(failure.reason, failure.message)
        return gone

    def expire(self, now: float) -> None:
        """Delete what was set aside too long ago, a little at a time. now: Unix seconds."""
        self._tally.expired(self._dead_letters.expire(now))

    def _send(self, rows: list[OutboxRow]) -> Failure | None:
        """Send rows. Returns: why one failed that is to be sent again."""
        if not rows:
            return None
        if self._sender is None:
            self._sender = self._open_sender()
        outcomes = self._sender.send([self._record(row) for row in rows])
        again: Failure | None = None
        for row, failure in zip(rows, outcomes, strict=True):
            if failure is None:
                self._tally.forwarded(1)
            elif failure.final:
                self._set_aside(self._sender, row, failure)
            else:
                again = again or failure
                continue
            self._done.add(row.exchange_id)
        return again

    def _set_aside(self, sender: Sender, row: OutboxRow, failure: Failure) -> None:
        kept = self._dead_letters.keep(row, failure.message)
        self._tally.set_aside(failure.reason if kept else "lost")
        log.error(
            "record_set_aside",
            exchange_id=row.exchange_id,
            bytes=len(row.payload),
            reason=failure.message,
        )
        sender.announce(row.exchange_id, failure.message, len(row.payload))

    def _record(self, row: OutboxRow) -> Record:
        key = partition_key(row.payload, self._partition_by, self._keyring)
        key = key or row.exchange_id.encode()
        return Record(key=key, value=row.payload, exchange_id=row.exchange_id)

    def close(self) -> None:
        """Close the connection; the next step opens one."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def partition_key(payload: bytes, by: PartitionBy, keyring: Keyring = NO_KEYS) -> bytes | None:
    """Return the key of a record; None when it cannot be read: ingest puts it aside. Pure.

    The session tree never joins exchanges of two projects, API keys or users, so records keyed by
    the three keep every session in one partition, whatever changes in the conversation. Feedback
    may come before its exchange, so its partition does not matter; its target keeps it in order.
    """
    try:
        payload = keyring.open(payload, BUS)
        if is_feedback(payload):
            feedback = decode_feedback(payload)
            return "\0".join((feedback.project, feedback.target)).encode()
        exchange = decode_exchange(payload)
    except (msgspec.MsgspecError, ValueError):
        return None
    if by == "session":
        text = exchange.session_key
    else:
        text = "\0".join((exchange.project, exchange.key_id, exchange.user))
    return text.encode()


# Forward until the process is stopped, as the only one with its `state_dir`.

PROCESS = "forward"
POLL_S = 0.1
"""Pause when the outbox is empty."""
LOCK_S = 1.0
"""Pause between attempts to take the lock, which the forwarder of a proxy that ends may hold."""


def forward_alone(
    state_dir: Path,
    forwarder: Forwarder,
    tally: Tally,
    stopping: threading.Event,
    stop_by: list[float],
) -> None:
    """Forward once no other process forwards with this `state_dir`, until it is stopped, and then
    what is still in the outbox. stop_by: holds the last moment for that, in monotonic seconds."""
    while not stopping.is_set():
        try:
            with only_one(state_dir, PROCESS):
                forward_until(forwarder, tally, stopping)
                _drain(forwarder, tally, stop_by[0])
                return
        except StateLockError as error:
            log.warning("forwarding_waits_for_lock", why=str(error))
            stopping.wait(LOCK_S)


def forward_until(forwarder: Forwarder, tally: Tally, stopping: threading.Event) -> None:
    """Forward until `stopping` is set. Errors are counted and logged, and tried again."""
    pauses = Backoff(first_s=0.5, last_s=5.0)
    failures = 0
    while not stopping.is_set():
        forwarder.expire(time.time())
        try:
            gone = forwarder.step()
        except (ForwardingError, OutboxError) as error:
            failures += 1
            pause_s = pauses.wait_s(failures)
            tally.failed(error.reason)
            log.warning("forwarding_waits", reason=error.reason, error=str(error), pause_s=pause_s)
            stopping.wait(pause_s)
            continue
        if gone or not failures:
            tally.worked()
            if failures:
                log.warning("forwarding_goes_on", failures=failures)
            failures = 0
        if not gone:
            stopping.wait(POLL_S)


def _drain(forwarder: Forwarder, tally: Tally, stop_by: float) -> None:
    try:
        while time.monotonic() < stop_by and forwarder.step():
            continue
    except (ForwardingError, OutboxError) as error:
        tally.failed(error.reason)
        log.warning("records_stay_in_outbox", why=str(error))
