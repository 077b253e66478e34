"""Look at the store again and again: one thread and one connection for everything polled there.

The relay reads attributes that the readers set; no request ever waits for the store. A look at an
SQLite file that nobody has written to since the last one costs a few microseconds instead of 700:
the file system tells by the times of the file and of its log, else SQLite by `PRAGMA data_version`;
and the file must still be the one that was opened.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import Connection, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from sidecar.errors import SettingsError

LOOKS_BETWEEN_READS = 50
"""Read even an unchanged file now and then: readers may have a clock of their own."""


SETTLED_NS = 50_000_000
"""A file whose last write is this old cannot be written again at the same time. Linux counts files'
times in ticks of 10 ms at most."""


class StoreReader(Protocol):
    """Something that is read at every look."""

    def read(self, connection: Connection) -> None:
        """Raises: SQLAlchemyError; then `store_away` is told, and what was read before stays."""
        ...

    def store_away(self, why: str) -> None:
        """This look failed."""
        ...


class StoreWatch:
    """`start` it, `stop` it."""

    def __init__(self, store_url: str, readers: Sequence[StoreReader], *, poll_s: float) -> None:
        """readers: in this order; one that fails does not keep the others from reading."""
        self._readers = readers
        self._poll_s = poll_s
        self._engine = open_store(store_url)
        self._kept = _KeptFile(self._engine) if self._engine.dialect.name == "sqlite" else None
        self._looking = threading.Lock()
        self._serves = threading.Lock()
        """Held until `stop`. (Not an Event: a wait for one is thirty steps of Python, which is much
        for a thread that wakes with cold caches, five times a second, for ever.)"""
        self._serves.acquire()
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)

    def start(self) -> None:
        """Look once, then go on looking in a thread."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        if self._serves.locked():
            self._serves.release()
        if self._thread.is_alive():
            self._thread.join()
        if self._kept is not None:
            self._kept.close()
        self._engine.dispose()

    def look(self) -> None:
        """Look at the store now. Never raises."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        if self._kept is not None:
            self._look_at_file(self._kept)
            return
        try:
            connection = self._engine.connect()
        except SQLAlchemyError as error:
            self._away(error)
            return
        with connection:
            self._read(connection)

    def _look_at_file(self, kept: _KeptFile) -> None:
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
        if good:
            connection.rollback()
        return good

    def _away(self, error: Exception) -> None:
        for reader in self._readers:
            reader.store_away(_cause(error))

    def _run(self) -> None:
        while not self._serves.acquire(timeout=self._poll_s):
            self.look()
        self._serves.release()


class _KeptFile:
    """A connection to an SQLite file, kept while the file is the same one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = engine.url.database or ""
        self._path = name.removeprefix("file:").partition("?")[0]
        self._connection: Connection | None = None
        self._file: tuple[int, int] | None = None
        self._log = self._path + "-wal"
        self._version = -1
        self._looks = 0
        self._written: tuple[int, ...] = ()
        """When, and how much, as of the last look; empty while that may still change unseen."""

    def changed(self) -> Connection | None:
        """The connection when there may be something new; None when there is nothing.

        Raises: OSError, sqlite3.Error, SQLAlchemyError when the file cannot be read.
        """
        status = os.stat(self._path)
        file = (status.st_dev, status.st_ino)
        self._looks += 1
        written = self._last_write(status)
        if written and written == self._written and self._looks % LOOKS_BETWEEN_READS:
            return None
        self._written = written
        if self._connection is None or file != self._file:
            self.close()
            self._connection = self._engine.connect()
            self._file = file
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection), "the engine's dialect is SQLite"
        (version,) = driver.execute("PRAGMA data_version").fetchone()
        if version == self._version and self._looks % LOOKS_BETWEEN_READS:
            return None
        self._version = version
        return self._connection

    def _last_write(self, file: os.stat_result) -> tuple[int, ...]:
        """What every later write will have changed, or nothing when that is not certain: two writes
        within one tick of the file system's clock show as one."""
        try:
            log = os.stat(self._log)
        except FileNotFoundError:
            return ()  # no log, or not yet: only SQLite can tell
        newest = max(file.st_mtime_ns, log.st_mtime_ns)
        if time.time_ns() - newest < SETTLED_NS:
            return ()
        return (
            file.st_ino,
            file.st_mtime_ns,
            file.st_size,
            log.st_ino,
            log.st_mtime_ns,
            log.st_size,
        )

    def close(self) -> None:
        """Open the file anew at the next look."""
        self._written = ()
        connection, self._connection = self._connection, None
        self._version = -1
        if connection is not None:
            connection.close()


def _cause(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error)


def open_store(store_url: str) -> Engine:
    """An engine for a store that exists. Raises: SettingsError when it is no database URL."""
    try:
        url = make_url(store_url)
    except ArgumentError as error:
        raise SettingsError("store.url: is not a database URL; see docs/settings.md") from error
    if url.get_backend_name() != "sqlite" or not url.database:
        return create_engine(url, pool_pre_ping=True)
    # mode=rw: never make the file, it is not ours. No pool: a file that was replaced is followed.
    query = {**url.query, "mode": "rw", "uri": "true"}
    path = url.database if url.database.startswith("file:") else f"file:{url.database}"
    # One thread at a time, but not always the same one.
    opened = url.set(database=path, query=query)
    return create_engine(
        opened, poolclass=NullPool, connect_args={"timeout": 1.0, "check_same_thread": False}
    )
