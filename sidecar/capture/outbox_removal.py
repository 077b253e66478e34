"""Remove single records from an outbox, or from a file of dead letters, and every trace of them.

SQLite leaves deleted bytes in pages that it uses again later. So the records are overwritten as
they are deleted, the file is written anew without its free pages, and the log is emptied. The
processes that have the file open go on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sidecar.errors import OutboxError
from sidecar.store.disk.write_ahead import WAIT_S, empty_log

BUSY_TIMEOUT_S = 15.0
PAGE = 20
"""Records that are in memory at once."""
REWRITTEN_BYTES = 256 * 2**20
"""A file with more in use is not written anew: its writers would wait for seconds."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What was done to one file."""

    removed: int
    traces: bool
    """True: earlier records may still have traces in it. Run it again when the file is drained."""


def remove_records(path: Path, table: str, wanted: Callable[[bytes], bool]) -> Removal:
    """Remove the records of `table` whose payload is wanted. No effect without the file.

    Raises: OutboxError.
    """
    if not path.exists():
        return Removal(0, traces=False)
    try:
        with closing(
            sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        ) as connection:
            found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,))
            if found.fetchone() is None:
                return Removal(0, traces=False)
            connection.execute("PRAGMA secure_delete=ON")
            removed = _remove(connection, table, wanted)
            return Removal(removed, traces=not _rewrite(connection))
    except sqlite3.Error as error:
        raise OutboxError("failed", f"{path}: {error}") from error


def _remove(connection: sqlite3.Connection, table: str, wanted: Callable[[bytes], bool]) -> int:
    last = removed = 0
    while True:
        rows = connection.execute(
            f"SELECT rowid, payload FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT ?",
            (last, PAGE),
        ).fetchall()
        if not rows:
            return removed
        last = rows[-1][0]
        for rowid, payload in rows:
            if isinstance(payload, bytes) and wanted(payload):
                # The number of waiting records is counted from the first to the last: it is too
                # large by this one until those behind it are stored.
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
                removed += 1


def _rewrite(connection: sqlite3.Connection) -> bool:
    """Returns: False when earlier records may still have traces in the file."""
    size, pages, free = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    small = (pages - free) * size <= REWRITTEN_BYTES
    if small:
        connection.execute("VACUUM")
    return empty_log(connection, wait_s=WAIT_S) and small
