"""Store which canary the breaker took out, and follow trips that other proxies stored.

The breaker itself needs no store. Control, the proxies of other machines and a restarted proxy read
the row. A thread of its own writes it, and tries again until the store takes it. A file in
`state_dir` holds the last trip, for a proxy that restarts before the store took the row.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from sidecar.routing.breaker import Breaker, canary_tag
from sidecar.routing.table import RoutingTable
from sidecar.store.existing import open_existing
from sidecar.store.tables import BREAKER_TRIP

log = structlog.get_logger()
FILE_NAME = "breaker-trip.json"
RETRY_S = 1.0
"""Seconds between attempts to write while the store is away."""


class TripReporter:
    """Writes trips. `report` returns at once; `stop` waits for an attempt in progress."""

    def __init__(
        self, store_url: str, state_dir: Path, clock: Callable[[], float] = time.time
    ) -> None:
        self._store_url = store_url
        self._file = state_dir / FILE_NAME
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


class TripReader:
    """Obeys the trips in the store. A `StoreReader`; it runs after the routing table was read."""

    def __init__(
        self,
        breaker: Breaker,
        current: Callable[[], RoutingTable],
        reporter: TripReporter,
        show: Callable[[float], None],
    ) -> None:
        """current: gives the newest routing table. show: gets 1 while its canary is out, else 0."""
        self._show = show
        self._breaker = breaker
        self._current = current
        self._reporter = reporter
        self._away = False

    def read(self, connection: Connection) -> None:
        """Take the table's canary out if the store says so; else report a trip that it lacks.

        The store lacks a trip when the worker that took the canary out died before it wrote.
        Raises: SQLAlchemyError.
        """
        now = self._current()
        if now.canary is None:
            self._show(0.0)
            return
        found = connection.execute(
            select(BREAKER_TRIP.c.reason).where(
                BREAKER_TRIP.c.model == now.model,
                BREAKER_TRIP.c.canary == now.canary,
                BREAKER_TRIP.c.salt == now.salt,
            )
        ).scalar_one_or_none()
        self._away = False
        if found is None:
            if self._breaker.is_out(now):
                last = self._reporter.recall()
                known = last is not None and canary_tag(last[0]) == canary_tag(now)
                self._reporter.report(now, last[1] if last and known else "not known any more")
        elif not self._breaker.is_out(now):
            self._breaker.open(now)
            log.warning("canary_taken_out_elsewhere", canary=now.canary, reason=found)
        self._show(float(self._breaker.is_out(now)))

    def store_away(self, why: str) -> None:
        """Log that trips cannot be read; the last ones stay."""
        if not self._away:
            log.warning("breaker_trips_unreadable", why=why)
        self._away = True
