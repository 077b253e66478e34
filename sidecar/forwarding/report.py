"""What the forwarding process tells the proxy: counts, one JSON line a second on a pipe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from sidecar.errors import OutboxError

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


_encoder = msgspec.json.Encoder()


def decode_report(line: bytes) -> Report:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=Report)


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
            self._pipe.write(_encoder.encode(self._tally.take(waiting)) + b"\n")
            self._pipe.flush()
        except OSError as error:  # the proxy has died; this process ends with it
            log.warning("report_not_written", why=str(error))
            self._stopping.set()
