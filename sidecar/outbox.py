"""The embedded bus: one SQLite file between the proxy, which writes it, and ingest, which reads it.

Both ends are here because the file format has one owner. Records stay until the reader says that
they are stored, so either process may die at any time: WAL mode keeps what was committed.
The writer keeps its file even when someone takes the file away: it looks, before each batch,
whether the name still leads to the file that it has open, and opens a new one if not.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sidecar.errors import OutboxError, SettingsError
from sidecar.records import Exchange, encode_exchange

SCHEME = "sqlite:///"
BUSY_TIMEOUT_S = 5.0
"""How long a writer waits for another's lock. Captures queue in memory meanwhile."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS outbox(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, exchange_id TEXT, at REAL, payload BLOB)"""
# Rows leave from the front only, so the ends give the number without counting.
_ROWS = "SELECT COALESCE(MAX(seq) - MIN(seq) + 1, 0) FROM outbox"
_REASONS = {
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_FULL: "disk_full",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """One record of the bus."""

    seq: int
    exchange_id: str
    at: float
    """When it was written, unix seconds."""
    payload: bytes
    """`sidecar.records.encode_exchange`"""


def outbox_path(url: str) -> Path:
    """The file that `bus.url` names. Raises SettingsError when it names another kind of bus."""
    path = url.removeprefix(SCHEME)
    if path == url or not path:
        kind = url.partition(":")[0]
        raise SettingsError(
            f"bus.url {kind}:…: this release has the embedded bus only, Kafka comes with a later "
            "one; set bus.url = 'sqlite:///path/to/outbox.db'"
        )
    return Path(path)


class _File:
    """The open file, opened when first needed and again after a failure or when it was replaced."""

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._connection: sqlite3.Connection | None = None
        self._inode = -1

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """The connection; what goes wrong with it is raised as OutboxError, and closes it."""
        try:
            yield self._open()
        except sqlite3.Error as error:
            self.close()
            reason = _REASONS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "failed")
            raise OutboxError(reason, f"outbox {self.path}: {error}") from error
        except OSError as error:
            self.close()
            raise OutboxError("unreachable", f"outbox {self.path}: {error}") from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and _inode(self.path) == self._inode:
            return self._connection
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)  # it holds what users wrote
        self._connection = _connect(self.path, self._busy_timeout_s)
        self._inode = _inode(self.path)
        return self._connection


class Outbox:
    """The writing end. One thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        max_rows: int,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = _File(path, busy_timeout_s)
        self._max_rows = max_rows
        self._clock = clock

    def write(self, exchanges: Sequence[Exchange]) -> int:
        """Store a batch in one transaction.

        Returns: how many were stored, from the front; fewer than came when the outbox is full.
        Raises: OutboxError when none was stored.
        """
        at = self._clock()
        with self._file.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            room = max(0, self._max_rows - connection.execute(_ROWS).fetchone()[0])
            kept = exchanges[:room]
            connection.executemany(
                "INSERT INTO outbox(exchange_id, at, payload) VALUES (?, ?, ?)",
                [(item.exchange_id, at, encode_exchange(item)) for item in kept],
            )
            connection.execute("COMMIT")
        return len(kept)

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        self._file.close()


class OutboxReader:
    """The reading end. One thread at a time."""

    def __init__(self, path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._file = _File(path, busy_timeout_s)

    def read(self, after: int, limit: int) -> list[OutboxRow]:
        """Records with a `seq` over `after`, in order, at most `limit`. Raises OutboxError.

        What was deleted never comes back, so a reader that deletes what it stored may always
        read after 0; that also holds when the file was lost and its numbers begin again.
        """
        with self._file.connection() as connection:
            rows = connection.execute(
                "SELECT seq, exchange_id, at, payload FROM outbox WHERE seq > ? "
                "ORDER BY seq LIMIT ?",
                (after, limit),
            )
            return [
                OutboxRow(seq=seq, exchange_id=name, at=at, payload=payload)
                for seq, name, at, payload in rows
            ]

    def delete_through(self, seq: int) -> None:
        """Forget the records up to and with `seq`: they are stored. Raises OutboxError."""
        with self._file.connection() as connection:
            connection.execute("DELETE FROM outbox WHERE seq <= ?", (seq,))

    def count(self) -> int:
        """Records that wait. Raises OutboxError."""
        with self._file.connection() as connection:
            rows: int = connection.execute(_ROWS).fetchone()[0]
            return rows

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        self._file.close()


def _connect(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(_SCHEMA)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1
