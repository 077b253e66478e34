"""Keep the usage of limits over a restart: a file in `state_dir`, written now and then.

Memory decides about requests (`limits.py`, `limits_table.py`); this file is only read at start. It
is written every `SAVE_S` seconds while something changes, and at the end. So an orderly restart
renews no allowance; a proxy that is killed forgets at most the last `SAVE_S` seconds.

One line of JSON for each key: `["<key id>", at, requests, day, tokens]`, as in `Usage`. A line that
cannot be read costs that key's usage and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import structlog

from sidecar.access.limits import (
    MAX_TOKENS,
    Count,
    Limiter,
    MemoryLimiter,
    Usage,
    is_spent_record,
)
from sidecar.access.limits_table import TableLimiter
from sidecar.metrics.hot import LabelledCounter
from sidecar.metrics.proxy import Metrics
from sidecar.settings import Settings

log = structlog.get_logger()
SAVE_S = 5.0
MAX_BYTES = 4 * 2**20
"""Size of a file that is read or written: over 50,000 keys that were used within a day. The start
waits for the reading, and the shared table has 16,384 slots."""
_KeyId = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9]{1,16}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Line = tuple[_KeyId, float, Annotated[float, msgspec.Meta(ge=0)], _Count, _Count]


class Counts(Protocol):
    """A limiter whose usage can be kept."""

    def records(self) -> list[tuple[str, Usage]]: ...

    def restore(self, records: Iterable[tuple[str, Usage]]) -> None: ...


class LimitsFile:
    """`start`, then `stop`. For one event loop."""

    def __init__(
        self, path: Path, counts: Counts, *, lost: Count, clock: Callable[[], float] = time.time
    ) -> None:
        """lost: counts usage that is gone: `unreadable` (the whole file), `line` (one key), and
        `not_saved` (a write that failed, or had no room for all keys: a restart before the next
        one forgets it)."""
        self._path = path
        self._counts = counts
        self._lost = lost
        self._clock = clock
        self._saved: list[tuple[str, Usage]] = []
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read the file, and write it from now on."""
        self._load()
        self._task = asyncio.create_task(self._keep_saved())

    async def stop(self) -> None:
        """Write what changed, and end."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("limits_unreadable", path=str(self._path), why=str(error))
            self._lost("unreadable")
            return
        if len(data) > MAX_BYTES:
            log.error(
                "limits_too_large",
                path=str(self._path),
                max_bytes=MAX_BYTES,
                to_do="every key begins anew; remove the file if no sidecar wrote it",
            )
            self._lost("unreadable")
            return
        records = []
        for line in data.splitlines():
            try:
                key_id, *usage = msgspec.json.decode(line, type=_Line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._lost("line")
                continue
            records.append((key_id, Usage(*usage)))
        self._counts.restore(records)

    async def _keep_saved(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):  # the next interval is over
                await asyncio.wait_for(self._stopping.wait(), SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Write what changed since the last time. Never raises: a failure is counted."""
        now = self._clock()
        records = [one for one in self._counts.records() if not is_spent_record(one[1], now)]
        if records == self._saved:
            return
        try:
            await asyncio.to_thread(self._write, records)
        except OSError as error:
            log.warning("limits_not_saved", path=str(self._path), why=str(error))
            self._lost("not_saved")
            return
        self._saved = records

    def _write(self, records: list[tuple[str, Usage]]) -> None:
        """Replace the file as a whole, so that a crash leaves the old one or the new one."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        size = 0
        with os.fdopen(descriptor, "wb") as file:
            for key_id, usage in records:
                line = msgspec.json.encode((key_id, *usage)) + b"\n"
                size += len(line)
                if size > MAX_BYTES:
                    self._lost("not_saved")
                    break
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


def limits_path(settings: Settings) -> Path:
    """The file of the proxy on this port. Two proxies that share a `state_dir` keep two files."""
    return settings.state_dir / f"limits-{settings.proxy.port}.jsonl"


def open_limits(
    settings: Settings, metrics: Metrics, table: int | None, clock: Callable[[], float]
) -> tuple[Limiter, LimitsFile | None]:
    """The limiter that the settings ask for, and the file that this process keeps for it.

    table: descriptor of the memory that several workers share; their parent keeps the file.
    """
    lost = counted(metrics.limits_lost, "limits_lost")
    if table is not None:
        unchecked = counted(metrics.limits_unchecked, "limits_unchecked")
        return TableLimiter(table, unchecked=unchecked, lost=lost), None
    memory = MemoryLimiter(lost)
    if settings.access.mode != "keys":
        return memory, None
    return memory, LimitsFile(limits_path(settings), memory, lost=lost, clock=clock)


def counted(counter: LabelledCounter, event: str) -> Count:
    """Count each time, and log the first time of each reason."""
    logged: set[str] = set()

    def count(reason: str) -> None:
        counter.labels(reason).inc()
        if reason not in logged:
            logged.add(reason)
            log.warning(event, reason=reason)

    return count
