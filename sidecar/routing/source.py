"""Follow the routing tables of all lines: one thread polls, the relay reads attributes.

The relay reads attributes that the readers set; no request ever waits for the store. A poll of an
SQLite file that did not change since the last poll costs tens of microseconds instead of 700:
`PRAGMA data_version` tells. Each poll also checks that the path still names the file that was
opened.

Modification times cannot tell: SQLite writes a transaction to its log, waits for the disk, and only
then lets readers see it. On a slow disk a poll within that wait sees the time of a transaction
that it cannot read yet, and the time does not change again.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import structlog
from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import SQLAlchemyError

from sidecar.lines import Line, project_of
from sidecar.metrics.proxy import Metrics
from sidecar.routing.breaker import Breaker
from sidecar.routing.breaker_report import TripReader, TripReporter, Watched
from sidecar.routing.table import RoutingTable, decode_table
from sidecar.store.engines import baseline, newest_revision, open_existing
from sidecar.store.tables import ROUTING_TABLE, TABLE_TAKEN

log = structlog.get_logger()

POLLS_BETWEEN_READS = 50
"""Every so many polls an unchanged file is read all the same: a reader may have a clock of its own
(`sidecar.access.key_source.FULL_READ_S`)."""


STOP_S = 1.0
"""Longest wait for a poll in progress."""


class StoreReader(Protocol):
    """What the watch calls at every poll."""

    def read(self, connection: Connection) -> None:
        """Raises: SQLAlchemyError; then the watch calls `store_away`, and what was read before
        stays."""

    def store_away(self, why: str) -> None: ...


class RevisionReader:
    """Logs once that the store's schema is newer than this release, or older than the baseline. It
    is read all the same: in an upgrade the proxies of the release before are replaced last."""

    _compared = False

    def read(self, connection: Connection) -> None:
        """Raises: SQLAlchemyError."""
        if self._compared:
            return
        present = connection.scalar(text("SELECT version_num FROM alembic_version"))
        self._compared = True
        if present is None:
            return
        if present > (known := newest_revision()):
            log.warning("store_is_newer", store=present, known=known, to_do="upgrade this proxy")
        elif present < (oldest := baseline()):
            to_do = f"upgrade the store: run ingest of the last commit that has {present}"
            log.warning("store_is_too_old", store=present, oldest=oldest, to_do=to_do)

    def store_away(self, why: str) -> None:
        """The routing source counts it."""


class StoreWatch:
    """`start` it, `stop` it."""

    def __init__(self, store_url: str, readers: Sequence[StoreReader], *, poll_s: float) -> None:
        """readers: in this order; one that fails does not keep the others from reading. Raises:
        SettingsError when `store_url` is not a database URL."""
        self._readers = readers
        self._poll_s = poll_s
        self._engine = open_existing(store_url)
        self._kept = _KeptFile(self._engine) if self._engine.dialect.name == "sqlite" else None
        self._polling = threading.Lock()
        self._serves = threading.Lock()
        """Held until `stop`. Not an Event: waiting for one takes thirty steps of Python, which is
        much for a thread that wakes several times a second with cold caches."""
        self._serves.acquire()
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)

    def start(self) -> None:
        """Poll once, then go on in a thread."""
        self.poll()
        self._thread.start()

    def stop(self) -> None:
        if self._serves.locked():
            self._serves.release()
        if self._thread.is_alive():
            self._thread.join(STOP_S)  # a store that hangs must not hold the end of the process
        if self._kept is not None:
            self._kept.close()
        self._engine.dispose()

    def poll(self) -> None:
        """Poll the store now. Never raises."""
        with self._polling:
            if self._kept is not None:
                self._poll_file(self._kept)
                return
            try:
                connection = self._engine.connect()
            except SQLAlchemyError as error:
                self._away(error)
                return
            with connection:
                self._read(connection)

    def _poll_file(self, kept: _KeptFile) -> None:
        try:
            connection = kept.changed()
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            kept.close()
            self._away(error)
            return
        if connection is not None and not self._read(connection):
            kept.close()

    def _read(self, connection: Connection) -> bool:
        """True when every reader could read."""
        good = True
        for reader in self._readers:
            try:
                reader.read(connection)
            except SQLAlchemyError as error:
                good = False
                reader.store_away(_cause(error))
                connection.rollback()  # PostgreSQL answers nothing after an error until then
        if good:
            connection.rollback()
        return good

    def _away(self, error: Exception) -> None:
        for reader in self._readers:
            reader.store_away(_cause(error))

    def _run(self) -> None:
        while not self._serves.acquire(timeout=self._poll_s):
            self.poll()
        self._serves.release()


class _KeptFile:
    """A connection to an SQLite file, kept while the path names the same file."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = engine.url.database or ""
        self._path = name.removeprefix("file:").partition("?")[0]
        self._connection: Connection | None = None
        self._file: tuple[int, int] | None = None
        self._version = -1
        self._polls = 0

    def changed(self) -> Connection | None:
        """The connection when the file may have changed since the last poll; else None. Raises:
        OSError, sqlite3.Error, SQLAlchemyError when the file cannot be read."""
        status = os.stat(self._path)
        file = (status.st_dev, status.st_ino)
        self._polls += 1
        if self._connection is None or file != self._file:
            self.close()
            self._connection = self._engine.connect()
            self._file = file
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection), "the engine's dialect is SQLite"
        (version,) = driver.execute("PRAGMA data_version").fetchone()
        if version == self._version and self._polls % POLLS_BETWEEN_READS:
            return None
        self._version = version
        return self._connection

    def close(self) -> None:
        """Close the connection, so that the next poll opens the file anew."""
        connection, self._connection = self._connection, None
        self._version = -1
        if connection is not None:
            connection.close()


def _cause(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error)


# Follow the routing tables in the store: a thread polls them, the relay reads attributes.


class FollowedTable:
    """The newest routing table of one line: `table` is what the relay obeys."""

    def __init__(self, line: str, metrics: Metrics, taken: Callable[[RoutingTable], None]) -> None:
        """taken: called with each table that is in effect from now on."""
        self.table = RoutingTable(model=line)
        self._seen = False
        self._failing: str | None = None
        self._metrics = metrics
        self._taken = taken
        project = project_of(line)
        of_project = metrics.project_generation
        self._generation = (
            metrics.routing_generation if project is None else of_project.labels(project)
        )

    def read(self, body: str | None) -> None:
        """Take what the store holds; None: it has no table of this line."""
        if body is None:
            self._recover()
            return
        try:
            found = decode_table(body)
        except (ValueError, TypeError) as error:  # bytes or a number, where a disk damaged the row
            self.fail("unreadable", str(error))
            return
        self._take(found)

    def fail(self, reason: str, why: str) -> None:
        """Count a poll that failed; the last table stays."""
        self._metrics.routing_failures.labels(reason).inc()
        if self._failing != reason:  # several polls a second: log it once
            log.warning("routing_table_kept", line=self.table.model, reason=reason, why=why)
        self._failing = reason

    def _take(self, found: RoutingTable) -> None:
        """Another table of the same generation is taken too: the store's last word, after a damaged
        number that cannot grow."""
        if found.model != self.table.model:
            self.fail("other_model", found.model)
            return
        if self._seen and found.generation < self.table.generation:
            numbers = f"generation {found.generation} after {self.table.generation}"
            self.fail("older", f"{numbers}: an older store was restored; restart this proxy")
            return
        self._recover()
        if not self._seen or found != self.table:
            self._seen = True
            self.table = found
            self._generation.set(found.generation)
            self._taken(found)
            log.info(
                "routing_changed",
                line=found.model,
                generation=found.generation,
                champion=found.champion,
                canary=found.canary,
                canary_weight_bp=found.canary_weight_bp,
            )

    def _recover(self) -> None:
        if self._failing is not None:
            log.info("routing_table_readable_again", line=self.table.model, after=self._failing)
        self._failing = None


class RoutingSource(StoreWatch):
    """The routing tables of all lines. `start` it, `stop` it."""

    def __init__(
        self,
        store_url: str,
        model: str,
        *,
        poll_s: float,
        metrics: Metrics,
        own: Sequence[str] = (),
        readers: Sequence[StoreReader] = (),
        taken: Callable[[RoutingTable], None] = lambda table: None,
    ) -> None:
        """model: name of the default line. own: names of the other lines.
        readers: read the store at each poll too, after the tables.
        taken: called with each table that is in effect from now on."""
        self.lines = {line: FollowedTable(line, metrics, taken) for line in (model, *own)}
        """By name of the line."""
        self.default = self.lines[model]
        columns = ROUTING_TABLE.c
        self._query = select(columns.model, columns.body).where(columns.model.in_(self.lines))
        super().__init__(store_url, (self, *readers), poll_s=poll_s)

    @property
    def table(self) -> RoutingTable:
        """The table of the default line."""
        return self.default.table

    def read(self, connection: Connection) -> None:
        """Read the tables once. Raises: SQLAlchemyError."""
        bodies = {row.model: row.body for row in connection.execute(self._query)}
        for line, followed in self.lines.items():
            followed.read(bodies.get(line))

    def store_away(self, why: str) -> None:
        """Count a poll that failed; the last tables stay."""
        self.default.fail("store_away", why)


# Tell the store when this proxy took a routing table: the time until a rollback is in effect.

RETRY_S = 1.0
TRIES = 30
"""Attempts to write one row; after that the page says that this proxy has not told."""
NAME_CHARACTERS = 255


def proxy_name(port: int, slot: int | None, project: str | None = None) -> str:
    """Name a process of a proxy: machine, port, which of several workers it is, and whose line of
    adapters the row is of, because a process has a row for each."""
    worker = "" if slot is None else f" worker {slot}"
    of = "" if project is None else f", project {project}"
    place = f":{port or os.getpid()}{worker}{of}"
    return socket.gethostname()[: NAME_CHARACTERS - len(place)] + place


class TakenReporter:
    """`report` returns at once; `stop` waits for an attempt in progress."""

    def __init__(self, store_url: str, proxy: str, clock: Callable[[], float] = time.time) -> None:
        """proxy: name of this process and line, one row each."""
        self._store_url = store_url
        self._proxy = proxy
        self._clock = clock
        self._stopped = threading.Event()
        self._newest: threading.Thread | None = None

    def report(self, table: RoutingTable) -> None:
        """Write that the table is in effect since now, in a thread."""
        if self._stopped.is_set():
            return
        self._newest = threading.Thread(
            target=self._write, args=(table, self._clock()), name="taken", daemon=True
        )
        self._newest.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._newest is not None:
            self._newest.join(STOP_S)

    def _write(self, table: RoutingTable, at: float) -> None:
        engine = open_existing(self._store_url)
        for tried in range(1, TRIES + 1):
            try:
                _store(engine, self._proxy, table, at)
                break
            except SQLAlchemyError as error:
                last = tried == TRIES or self._stopped.is_set()
                if tried == 1 or last:
                    why = _cause(error)
                    event = "table_taken_not_told" if last else "table_taken_told_later"
                    log.warning(event, generation=table.generation, why=why)
                if last or self._stopped.wait(RETRY_S):
                    break
        engine.dispose()


def _store(engine: Engine, proxy: str, table: RoutingTable, at: float) -> None:
    """Write the row, unless it tells of a newer table already. Raises: SQLAlchemyError."""
    row = {"proxy": proxy, "model": table.model, "generation": table.generation, "taken_at": at}
    with engine.begin() as connection:
        # The engine has imported the dialect that is in use.
        if connection.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert
        else:
            from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
        statement = insert(TABLE_TAKEN).values(**row)
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["proxy"],
                set_={name: statement.excluded[name] for name in row if name != "proxy"},
                where=TABLE_TAKEN.c.taken_at <= statement.excluded.taken_at,
            )
        )


# Follow every line of adapters: its routing table, its breaker, and what the store is told.


class FollowedLines:
    """`source` is to be started and stopped, then `stop` called."""

    def __init__(
        self,
        lines: Sequence[Line],
        *,
        store_url: str,
        state_dir: Path,
        poll_s: float,
        metrics: Metrics,
        port: int,
        slot: int | None = None,
        memory: Mapping[str, memoryview] = MappingProxyType({}),
        row: int = 0,
        rows: int = 1,
        readers: Sequence[StoreReader] = (),
    ) -> None:
        """lines: the default one first. port, slot: name this process (`proxy_name`). memory: by
        name of a line, what the workers' breakers share; a line without any counts alone. row,
        rows: as for `Breaker`. readers: as for `RoutingSource`, before the trips."""
        self._reporters: list[TripReporter] = []
        self._taken: dict[str, TakenReporter] = {}
        self.breakers: dict[str, Breaker] = {}
        """By name of the line."""
        trips: list[Watched] = []
        for line in lines:
            project = line.project
            reporter = TripReporter(store_url, state_dir, project=project)
            shown = metrics.breaker_open
            if project is not None:
                shown = metrics.project_breaker_open.labels(project)
            breaker = Breaker(metrics, memory.get(line.name), row, rows, reporter.report, shown)
            last_trip = reporter.recall()
            if last_trip is not None:
                breaker.open(last_trip[0], first=True)
            self._reporters.append(reporter)
            self._taken[line.name] = TakenReporter(store_url, proxy_name(port, slot, project))
            self.breakers[line.name] = breaker
            trips.append(
                Watched(line=line.name, breaker=breaker, reporter=reporter, show=shown.set)
            )
        trip_reader = TripReader(trips, lambda line: self.source.lines[line].table)
        self.source = RoutingSource(
            store_url,
            lines[0].name,
            poll_s=poll_s,
            metrics=metrics,
            own=[line.name for line in lines[1:]],
            readers=(*readers, trip_reader, RevisionReader()),
            taken=lambda table: self._taken[table.model].report(table),
        )
        self.own: dict[str, tuple[FollowedTable, Breaker]] = {
            line.project: (self.source.lines[line.name], self.breakers[line.name])
            for line in lines
            if line.project is not None
        }
        """Project -> its table and its breaker, for projects with lines of their own."""
        self.default = (self.source.default, self.breakers[lines[0].name])

    def stop(self) -> None:
        """Wait for attempts in progress to tell the store, a second or so for all lines."""
        ends = [*self._reporters, *self._taken.values()]
        with ThreadPoolExecutor(len(ends)) as threads:
            list(threads.map(lambda one: one.stop(), ends))
