"""The embedded bus: one SQLite file between the proxy, which writes it, and ingest, which reads it.

The writer and the reader are both here, because the file format has one owner. A record stays until
the reader confirms that it is stored, so either process may die at any time: WAL mode keeps what
was committed, and each commit of a writer is synced to the disk (docs/durability.md). When the file
is deleted or moved, both sides notice at their next step, because the path no longer leads to the
file that they have open, and open a new one. One writer counts the unread records of the lost file.
Several processes may write. The reader gives the space of deleted records back to the disk
(`outbox_space`).
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import structlog

from sidecar.capture import outbox_space
from sidecar.capture.yielding import CooperativeYield, never_yield
from sidecar.errors import OutboxError, SettingsError
from sidecar.records import Exchange, encode_exchange
from sidecar.settings.bus_url import outbox_file
from sidecar.store.keyring import BUS, NO_KEYS, Keyring

log = structlog.get_logger()
BUSY_TIMEOUT_S = 5.0
"""Seconds that a writer waits for the lock of the file. Captures queue in memory meanwhile."""
ROWS_AT_ONCE = 8
"""Rows written between two calls of `yield_cpu`."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS outbox(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, exchange_id TEXT, at REAL, payload BLOB)"""
# Rows are deleted from the front only, so the first and last `seq` give their number. Each has its
# own SELECT: SQLite reads one index entry for MIN or MAX alone, but the whole table for both.
_ROWS = """SELECT COALESCE(
    (SELECT MAX(seq) FROM outbox) - (SELECT MIN(seq) FROM outbox) + 1, 0)"""
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
    """One record in the outbox."""

    seq: int
    exchange_id: str
    """Id of the record: of an exchange, or of feedback."""
    at: float
    """When the record was written, unix seconds."""
    payload: bytes
    """The exchange, packed by `sidecar.records.encode_exchange`, or the feedback, packed by
    `sidecar.feedback.record.encode_feedback`; encrypted when the writer has a key."""


def outbox_path(url: str, state_dir: Path) -> Path:
    """Return the outbox that belongs to `bus.url`: its own file, or one in `state_dir` for Kafka.

    Raises: SettingsError when the URL names no bus.
    """
    try:
        return outbox_file(url, state_dir)
    except ValueError as error:
        raise SettingsError(f"bus.url: {error}") from error


class _File:
    """The database file. Opened at first use, after a failure, and after it was replaced."""

    def __init__(
        self,
        path: Path,
        busy_timeout_s: float,
        on_rows_gone: Callable[[int], object] | None = None,
        *,
        synchronous: Literal["FULL", "NORMAL"],
    ) -> None:
        """synchronous: FULL syncs each commit to the disk, which then survives a power cut; NORMAL
        does not, and what is committed survives the death of this process."""
        self.path = path
        self._synchronous = synchronous
        self._on_rows_gone = on_rows_gone
        self._busy_timeout_s = busy_timeout_s
        self._connection: sqlite3.Connection | None = None
        self._inode = -1

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection. An error closes it and is raised as OutboxError."""
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
        if self._connection is not None and self._on_rows_gone is not None:
            self._on_rows_gone(_claim_unread(self._connection))
        self.close()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(self.path.parent):
            if not self.path.exists():
                # SQLite would take the log files of the old database for those of the new one.
                for suffix in ("-wal", "-shm"):
                    self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self.path.touch(mode=0o600)  # it contains what users wrote
            self._connection = _connect(self.path, self._busy_timeout_s, self._synchronous)
            self._inode = _inode(self.path)
        return self._connection


class Outbox:
    """Writes to the outbox. One thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        max_rows: int,
        max_bytes: int | None = None,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        clock: Callable[[], float] = time.time,
        on_rows_gone: Callable[[int], object] | None = None,
        yield_cpu: CooperativeYield = never_yield,
        keyring: Keyring = NO_KEYS,
    ) -> None:
        """max_bytes: of the file's pages in use; None: no limit.
        on_rows_gone: called with the number of unread records lost with a deleted or moved file,
        by only one of its writers. yield_cpu: called between two steps of a write.
        keyring: encrypts the records."""
        self._file = _File(path, busy_timeout_s, on_rows_gone, synchronous="FULL")
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._clock = clock
        self._yield_cpu = yield_cpu
        self._keyring = keyring

    def write(self, exchanges: Sequence[Exchange]) -> int:
        """Store a batch in one transaction.

        Returns: how many were stored, from the front of the batch; fewer when the outbox is full.
        Raises: OutboxError when none was stored.
        """
        # Encode before the transaction, so that other writers do not wait for it.
        return self.append([(item.exchange_id, encode_exchange(item)) for item in exchanges])

    def append(self, records: Sequence[tuple[str, bytes]]) -> int:
        """Store packed records, each with its id, in one transaction.

        Returns and raises: as `write`.
        """
        at = self._clock()
        rows = [(name, at, self._keyring.seal(payload, BUS)) for name, payload in records]
        with self._file.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            room = max(0, self._max_rows - connection.execute(_ROWS).fetchone()[0])
            kept = self._fitting(connection, rows[:room])
            for start in range(0, len(kept), ROWS_AT_ONCE):
                connection.executemany(
                    "INSERT INTO outbox(exchange_id, at, payload) VALUES (?, ?, ?)",
                    kept[start : start + ROWS_AT_ONCE],
                )
                self._yield_cpu()
            connection.execute("COMMIT")
        return len(kept)

    def _fitting(
        self, connection: sqlite3.Connection, rows: Sequence[tuple[str, float, bytes]]
    ) -> Sequence[tuple[str, float, bytes]]:
        """Return the rows from the front that fit into `max_bytes`."""
        if self._max_bytes is None:
            return rows
        sizes = accumulate(len(payload) for _, _, payload in rows)
        room = self._max_bytes - outbox_space.used_bytes(connection)
        return rows[: sum(size <= room for size in sizes)]

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        self._file.close()


class OutboxReader:
    """Reads from the outbox. One thread at a time."""

    def __init__(self, path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        # A deletion that a power cut undoes makes a record come twice, which changes nothing.
        self._file = _File(path, busy_timeout_s, synchronous="NORMAL")

    def read(self, after: int, limit: int, limit_bytes: int | None = None) -> list[OutboxRow]:
        """Return the records with a `seq` above `after`, in order, at most `limit`.

        limit_bytes: of payloads; the first record is returned however large it is. None: no limit.
        A reader that deletes what it has stored may always read after 0, also when the file was
        lost and the numbers began again.
        Raises: OutboxError.
        """
        found: list[OutboxRow] = []
        size = 0
        with self._file.connection() as connection, closing(connection.cursor()) as rows:
            # SQLite reads a row when it is asked for: the rest is never in memory.
            rows.execute(
                "SELECT seq, exchange_id, at, payload FROM outbox WHERE seq > ? "
                "ORDER BY seq LIMIT ?",
                (after, limit),
            )
            for seq, name, at, payload in rows:
                size += len(payload)
                if found and limit_bytes is not None and size > limit_bytes:
                    break
                found.append(OutboxRow(seq=seq, exchange_id=name, at=at, payload=payload))
            rows.close()  # the file is shrunk when nobody reads it
            if not found:
                outbox_space.shrink(connection, self._file.path, drained=True)
        return found

    def delete_through(self, seq: int) -> None:
        """Delete the records up to and including `seq`, which are stored. Raises: OutboxError."""
        with self._file.connection() as connection:
            connection.execute("DELETE FROM outbox WHERE seq <= ?", (seq,))
            outbox_space.shrink(connection, self._file.path, drained=False)

    def count(self) -> int:
        """Return the number of waiting records. Raises: OutboxError."""
        with self._file.connection() as connection:
            rows: int = connection.execute(_ROWS).fetchone()[0]
            return rows

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        self._file.close()


def _connect(path: Path, busy_timeout_s: float, synchronous: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        outbox_space.prepare(connection)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute(_SCHEMA)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _claim_unread(connection: sqlite3.Connection) -> int:
    """Return the number of records in a file that was deleted or moved.

    It is 0 when another writer has counted them (a mark in the file says so), or when the file can
    no longer be read.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("PRAGMA user_version").fetchone()[0] != 0:
            connection.execute("ROLLBACK")
            return 0
        unread: int = connection.execute(_ROWS).fetchone()[0]
        connection.execute("PRAGMA user_version = 1")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        log.warning("outbox_gone_uncounted", error=str(error))
        return 0
    if unread:
        log.warning("outbox_gone", unread=unread)
    return unread


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let one process at a time open or create an outbox in this directory.

    Two processes that create one would delete each other's log files, and the first switch to WAL
    mode fails while another one is under way. Raises: OSError.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1
