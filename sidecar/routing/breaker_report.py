"""Store which canary the breaker took out, and follow trips that other proxies stored.

The breaker itself needs no store. Control, the proxies of other machines and a restarted proxy read
the row. A thread of its own writes it, and tries again until the store takes it. A file in
`state_dir` holds the last trip, for a proxy that restarts before the store took the row. Each line
of adapters has a reporter and a file of its own, and one query reads the trips of all.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from sqlalchemy import Connection, and_, insert, or_, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from sidecar.routing.breaker import Breaker, canary_tag
from sidecar.routing.table import RoutingTable
from sidecar.store.engines import open_existing
from sidecar.store.tables import BREAKER_TRIP

log = structlog.get_logger()
FILE_NAME = "breaker-trip{}.json"
"""With "-" and the project in a project's own line."""
RETRY_S = 1.0
"""Seconds between attempts to write while the store is away."""


class TripReporter:
    """Writes trips. `report` returns at once; `stop` waits for an attempt in progress."""

    def __init__(
        self,
        store_url: str,
        state_dir: Path,
        clock: Callable[[], float] = time.time,
        *,
        project: str | None = None,
    ) -> None:
        """project: whose line of adapters it is; None: the default line."""
        self._store_url = store_url
        self._file = state_dir / FILE_NAME.format("" if project is None else f"-{project}")
        self._clock = clock
        self._stopped = threading.Event()
        self._threads: dict[tuple[str | None, str], threading.Thread] = {}

    def report(self, tripped: RoutingTable, reason: str) -> None:
        """Write the row in a thread. The same trip reported twice is one row."""
        key = (tripped.canary, tripped.salt)
        if key in self._threads or self._stopped.is_set():
            return
        thread = threading.Thread(
            target=self._write, args=(tripped, reason, self._clock()), name="breaker", daemon=True
        )
        self._threads[key] = thread
        thread.start()

    def recall(self) -> tuple[RoutingTable, str] | None:
        """Read this machine's last trip and its reason from the file; None without one."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=tuple[RoutingTable, str])
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("breaker_file_unreadable", path=str(self._file), why=str(error))
            return None

    def stop(self) -> None:
        self._stopped.set()
        for thread in list(self._threads.values()):
            thread.join(RETRY_S)

    def _write(self, tripped: RoutingTable, reason: str, at: float) -> None:
        engine = open_existing(self._store_url)
        row = {
            "model": tripped.model,
            "canary": tripped.canary,
            "salt": tripped.salt,
            "at": at,
            "reason": reason,
        }
        self._remember(tripped, reason)
        told = False
        while True:
            try:
                with engine.begin() as connection:
                    connection.execute(insert(BREAKER_TRIP).values(**row))
                log.info("breaker_trip_stored", canary=tripped.canary)
                break
            except IntegrityError:  # another worker was faster
                log.info("breaker_trip_stored_already", canary=tripped.canary)
                break
            except SQLAlchemyError as error:
                if not told:
                    log.warning("breaker_trip_not_stored", again_in_s=RETRY_S, why=str(error))
                told = True
            if self._stopped.wait(RETRY_S):
                log.error("breaker_trip_lost", canary=tripped.canary, reason=reason)
                break
        engine.dispose()

    def _remember(self, tripped: RoutingTable, reason: str) -> None:
        written = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            written.write_bytes(msgspec.json.encode((tripped, reason)))
            written.replace(self._file)
        except OSError as error:
            log.warning("breaker_file_not_written", path=str(self._file), why=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What the trips of one line are read for."""

    line: str
    """Name of the line."""
    breaker: Breaker
    reporter: TripReporter
    show: Callable[[float], None]
    """Gets 1 while the table's canary is out, else 0."""


class TripReader:
    """Obeys the trips in the store. A `StoreReader`; it runs after the routing tables were read."""

    def __init__(self, lines: Sequence[Watched], current: Callable[[str], RoutingTable]) -> None:
        """current: gives the newest routing table of a line."""
        self._lines = lines
        self._current = current
        self._away = False

    def read(self, connection: Connection) -> None:
        """Take canaries out if the store says so; else report trips that it lacks, because the
        worker that took the canary out died before it wrote. Raises: SQLAlchemyError."""
        tables = [(line, self._current(line.line)) for line in self._lines]
        found = _stored(connection, [now for _, now in tables if now.canary is not None])
        self._away = False
        for line, now in tables:
            if now.canary is not None:
                _obey(line, now, found.get((now.model, now.canary, now.salt)))
            line.show(float(line.breaker.is_out(now)))

    def store_away(self, why: str) -> None:
        """Log that trips cannot be read; the last ones stay."""
        if not self._away:
            log.warning("breaker_trips_unreadable", why=why)
        self._away = True


def _stored(
    connection: Connection, tables: Sequence[RoutingTable]
) -> dict[tuple[str, str, str], str]:
    """Return the reason of each trip of these tables' canaries, by model, canary and salt."""
    if not tables:
        return {}
    trip = BREAKER_TRIP.c
    keys = (
        and_(trip.model == now.model, trip.canary == now.canary, trip.salt == now.salt)
        for now in tables
    )
    rows = connection.execute(
        select(trip.model, trip.canary, trip.salt, trip.reason).where(or_(*keys))
    )
    return {(row.model, row.canary, row.salt): row.reason for row in rows}


def _obey(line: Watched, now: RoutingTable, stored: str | None) -> None:
    if stored is not None:
        if not line.breaker.is_out(now):
            line.breaker.open(now)
            log.warning("canary_taken_out_elsewhere", canary=now.canary, reason=stored)
    elif line.breaker.is_out(now):
        last = line.reporter.recall()
        known = last is not None and canary_tag(last[0]) == canary_tag(now)
        line.reporter.report(now, last[1] if last and known else "not known any more")
