"""Give the disk space of deleted records back, so that a drained outbox is a small file.

SQLite keeps the pages of deleted rows in a list of free pages and uses them again; by itself the
file never shrinks. Two ways of shrinking it are used, each in the reader and in short transactions,
because writers wait for the same lock:

- When little is left in the file, VACUUM writes that little into a new file. Its time depends on
  what is left, not on what is free.
- Otherwise PRAGMA incremental_vacuum moves pages from the file's end into free ones. It searches
  the whole list for each page, so it works in small steps, for a limited time. It needs
  auto_vacuum, which a file gets before its first table is made, or from VACUUM.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import structlog

log = structlog.get_logger()
LOG_BYTES = 512 * 1024
"""A longer -wal file is truncated when the outbox is drained, and by SQLite when it is reset."""
IDLE_FREE_BYTES = 512 * 1024
"""Free space that a drained file keeps for the next records."""
BUSY_FREE_BYTES = 16 * 2**20
"""Free space that a file in use keeps: a few batches of ingest."""
COPIED_BYTES = 2**20
"""VACUUM runs when at most this much is left in the file: a few milliseconds."""
STEP_PAGES = 32
STEPS_S = 0.02
"""The steps of one call end after this time; each is a transaction of its own."""
_INCREMENTAL = 2
_LATER = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def prepare(connection: sqlite3.Connection) -> None:
    """Set up a connection. Call it before the first table is made and before WAL mode is set."""
    if _number(connection, "page_count") == 0:
        # It has no effect on a file with tables, and would wait there for the lock of writers.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the size of the pages that hold something. It reads no row."""
    size, pages, free = _sizes(connection)
    return (pages - free) * size


def shrink(connection: sqlite3.Connection, path: Path, *, drained: bool) -> None:
    """Give back free space, if there is much. It does not wait for a lock: a later call goes on.

    drained: there was nothing to read; then less is kept, and the -wal file is truncated.
    """
    wait_ms = _number(connection, "busy_timeout")
    try:
        connection.execute("PRAGMA busy_timeout = 0")
        _shrink(connection, IDLE_FREE_BYTES if drained else BUSY_FREE_BYTES)
        if drained:
            _truncate_log(connection, path)
    except sqlite3.OperationalError as error:
        # The records are safe: only space is not given back yet.
        if error.sqlite_errorcode & 0xFF not in _LATER:
            log.warning("outbox_not_shrunk", error=str(error))
    finally:
        connection.execute(f"PRAGMA busy_timeout = {wait_ms}")


def _shrink(connection: sqlite3.Connection, kept_bytes: int) -> None:
    size, pages, free = _sizes(connection)
    if free * size <= kept_bytes:
        return
    if (pages - free) * size <= COPIED_BYTES:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # for a file of an older version
        connection.execute("VACUUM")
        return
    if _number(connection, "auto_vacuum") != _INCREMENTAL:
        return  # until little is left in it
    end = time.monotonic() + STEPS_S
    while free * size > kept_bytes and time.monotonic() < end:
        # The pages are moved while the (empty) result is read.
        connection.execute(f"PRAGMA incremental_vacuum({STEP_PAGES})").fetchall()
        free = _number(connection, "freelist_count")


def _truncate_log(connection: sqlite3.Connection, path: Path) -> None:
    """Write the log into the file, which also shortens the file, and empty the log."""
    size, pages, _ = _sizes(connection)
    logged = path.with_name(f"{path.name}-wal")
    if _file_bytes(logged) > LOG_BYTES or _file_bytes(path) > pages * size:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _sizes(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Bytes of a page, pages of the file, free pages."""
    return (
        _number(connection, "page_size"),
        _number(connection, "page_count"),
        _number(connection, "freelist_count"),
    )


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted by somebody: the next read opens a new file
        return 0


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    number: int = connection.execute(f"PRAGMA {pragma}").fetchone()[0]
    return number
