"""Poll the store: one thread and one connection for everything that the proxy follows there.

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
import sqlite3
import threading
from collections.abc import Sequence
from typing import Protocol

import structlog
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from sidecar.store.existing import newest_revision, open_existing

log = structlog.get_logger()

POLLS_BETWEEN_READS = 50
"""Every so many polls an unchanged file is read all the same: a reader may have a clock of its own
(`sidecar.access.key_source.FULL_READ_S`)."""


STOP_S = 1.0
"""Longest wait for a poll in progress."""


class StoreReader(Protocol):
    """What the watch calls at every poll."""

    def read(self, connection: Connection) -> None:
        """Read the store.

        Raises: SQLAlchemyError; then the watch calls `store_away`, and what was read before stays.
        """
        ...

    def store_away(self, why: str) -> None:
        """Take note that this poll failed."""
        ...


class RevisionReader:
    """Says once that a newer release has migrated the store. A proxy of the release before reads it
    all the same: in an upgrade the proxies come last."""

    _compared = False

    def read(self, connection: Connection) -> None:
        """Raises: SQLAlchemyError."""
        if self._compared:
            return
        present = connection.scalar(text("SELECT version_num FROM alembic_version"))
        self._compared = True
        if present is not None and present > (known := newest_revision()):
            log.warning("store_is_newer", store=present, known=known, to_do="upgrade this proxy")

    def store_away(self, why: str) -> None:
        """The routing source counts it."""


class StoreWatch:
    """`start` it, `stop` it."""

    def __init__(self, store_url: str, readers: Sequence[StoreReader], *, poll_s: float) -> None:
        """readers: in this order; one that fails does not keep the others from reading.

        Raises: SettingsError when `store_url` is not a database URL.
        """
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
        """End the thread and close the connection."""
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
            self._poll()

    def _poll(self) -> None:
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
        """The connection when the file may have changed since the last poll; else None.

        Raises: OSError, sqlite3.Error, SQLAlchemyError when the file cannot be read.
        """
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
