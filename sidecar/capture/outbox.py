"""The embedded bus: one SQLite file that the proxy writes and ingest reads, and its upkeep.

The writer and the reader are both here, because the file format has one owner. A record stays until
the reader confirms that it is stored, so either process may die at any time: WAL mode keeps what
was committed, and each commit of a writer is synced to the disk (docs/durability.md). When the file
is deleted or moved, both sides notice at their next step, because the path no longer leads to the
file that they have open, and open a new one. One writer counts the unread records of the lost file.
Several processes may write. The reader gives the space of deleted records back to the disk.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import structlog

from sidecar.capture.recorder import CooperativeYield, never_yield
from sidecar.errors import OutboxError, SettingsError
from sidecar.metrics.families import Family, merge_tables
from sidecar.records import Exchange, encode_exchange
from sidecar.settings.kinds import outbox_file
from sidecar.store.keyring import BUS as BUS_KEYS, NO_KEYS, Keyring
from sidecar.store.write_ahead import WAIT_S, empty_log

# Remove single records from an outbox, or from a file of dead letters, and every trace of them.

REMOVAL_TIMEOUT_S = 15.0
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
    """Remove the records of `table` whose payload is wanted, if there is a file. Raises:
    OutboxError."""
    if not path.exists():
        return Removal(0, traces=False)
    try:
        with closing(
            sqlite3.connect(path, timeout=REMOVAL_TIMEOUT_S, isolation_level=None)
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
    small = used_bytes(connection) <= REWRITTEN_BYTES
    if small:
        connection.execute("VACUUM")
    return empty_log(connection, wait_s=WAIT_S) and small


# Give the disk space of deleted records back, so that a drained outbox is a small file.

log = structlog.get_logger()
PAGE_BYTES = 16 * 1024
"""A write takes 0.6 of the CPU time that SQLite's 4 kB take, for records of 3 kB and of 250 kB."""
LOG_BYTES = 512 * 1024
"""A longer -wal file is truncated when the outbox is drained, and by SQLite when it is reset."""
IDLE_FREE_BYTES = 512 * 1024
"""Free space that a drained file keeps for the next records."""
BUSY_FREE_BYTES = 16 * 2**20
"""Free space that a file in use keeps: a few batches of ingest."""
COPIED_BYTES = 2**20
"""VACUUM runs when at most this much is left in the file: a few milliseconds."""
STEP_PAGES = 8
STEPS_S = 0.02
"""The steps of one call end after this time; each is a transaction of its own."""
_INCREMENTAL = 2
_LATER = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def prepare(connection: sqlite3.Connection) -> None:
    """Set up a connection. Call it before the first table is made and before WAL mode is set."""
    if _number(connection, "page_count") == 0:
        # They have no effect on a file with tables, and would wait there for the lock of writers.
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
    connection.execute("PRAGMA wal_autocheckpoint = 256")  # pages: 4 MB


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the size of the pages that hold something. It reads no row."""
    size, pages, free = _sizes(connection)
    return (pages - free) * size


def shrink(connection: sqlite3.Connection, path: Path, *, drained: bool) -> None:
    """Give back free space, if there is much. It does not wait for a lock: a later call goes on.
    drained: there was nothing to read; then less is kept, and the -wal file is truncated."""
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
    `sidecar.feedback.encode_feedback`; encrypted when the writer has a key."""


def outbox_path(url: str, state_dir: Path) -> Path:
    """Return the outbox that belongs to `bus.url`: its own file, or one in `state_dir` for Kafka.
    Raises: SettingsError when the URL names no bus."""
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


RECORD_BYTES = 20_000
"""The outbox keeps one record more than `bus.max_bytes` has multiples of this."""


class Outbox:
    """Writes to the outbox. One thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int | None = None,
        max_rows: int | None = None,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        clock: Callable[[], float] = time.time,
        on_rows_gone: Callable[[int], object] | None = None,
        yield_cpu: CooperativeYield = never_yield,
        keyring: Keyring = NO_KEYS,
    ) -> None:
        """max_bytes: of the file's pages in use; None: no limit. max_rows: unread records; None: as
        many as RECORD_BYTES and max_bytes allow.
        on_rows_gone: called with the number of unread records lost with a deleted or moved file,
        by only one of its writers. yield_cpu: called between two steps of a write.
        keyring: encrypts the records."""
        self._file = _File(path, busy_timeout_s, on_rows_gone, synchronous="FULL")
        if max_rows is None:
            max_rows = sys.maxsize if max_bytes is None else 1 + max_bytes // RECORD_BYTES
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._clock = clock
        self._yield_cpu = yield_cpu
        self._keyring = keyring

    def write(self, exchanges: Sequence[Exchange]) -> int:
        """Store a batch in one transaction. Returns: how many were stored, from the front of the
        batch; fewer when the outbox is full. Raises: OutboxError when none was stored."""
        # Encode before the transaction, so that other writers do not wait for it.
        return self.append([(item.exchange_id, encode_exchange(item)) for item in exchanges])

    def append(self, records: Sequence[tuple[str, bytes]]) -> int:
        """As `write`, of packed records, each with its id."""
        at = self._clock()
        rows = [(name, at, self._keyring.seal(payload, BUS_KEYS)) for name, payload in records]
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
        room = self._max_bytes - used_bytes(connection)
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
        """Return the records with a `seq` above `after`, in order, at most `limit`. A reader that
        deletes what it has stored may always read after 0, also when the file was lost and the
        numbers began again. limit_bytes: of payloads; the first record is returned however large it
        is; None: no limit. Raises: OutboxError."""
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
                shrink(connection, self._file.path, drained=True)
        return found

    def delete_through(self, seq: int) -> None:
        """Delete the records up to and including `seq`, which are stored. Raises: OutboxError."""
        with self._file.connection() as connection:
            connection.execute("DELETE FROM outbox WHERE seq <= ?", (seq,))
            shrink(connection, self._file.path, drained=False)

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
        prepare(connection)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute(_SCHEMA)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _claim_unread(connection: sqlite3.Connection) -> int:
    """Return the number of records in a file that was deleted or moved: 0 when another writer has
    counted them (a mark in the file says so), or when the file can no longer be read."""
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
    """Let one process at a time open or create an outbox in this directory: two would delete each
    other's log files, and the first switch to WAL mode fails while another one is under way.
    Raises: OSError."""
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


# Tell the store what became of this proxy's requests, a few seconds behind.

INTERVAL_S = 5.0
"""Seconds between two transactions; each takes about a millisecond of the store's write lock."""
STOP_S = 5.0
"""Longest wait for the last transaction."""
REQUESTS, CAPTURE, BUS, RETENTION = "requests", "capture", "bus", "retention"
"""Stages of the counter rows."""
KEPT = "kept"
REFUSED = "refused_"
"""Beginning of the reasons of requests that the proxy refused for what their bodies say."""
FORWARDED = "forwarded"
Counts = dict[tuple[str, str], int]
"""(stage, reason) -> records."""
Cells = dict[bytes, tuple[float, ...]]
"""A table of metrics, as `MetricTable.read` returns it."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A metric, and what its counter rows are called: a label follows the reason."""

    metric: str
    stage: str
    reason: str = ""
    label: str = ""

    @property
    def family(self) -> Family:
        labels = (self.label,) if self.label else ()
        return Family(kind="counter", name=self.metric, help="", label_names=labels)


SOURCES = (
    _Source("sidecar_captures_kept", CAPTURE, KEPT),
    _Source("sidecar_captures_lost", CAPTURE, "lost_", "reason"),
    _Source("sidecar_captures_skipped", CAPTURE, "skipped_", "reason"),
    _Source("sidecar_forwarded", BUS, FORWARDED),
    _Source("sidecar_forward_set_aside", BUS, "set_aside_", "reason"),
    _Source("sidecar_forward_expired", RETENTION, "proxy_dead_letters"),
    _Source("sidecar_outbox_rows_gone", BUS, "outbox_gone"),
    _Source("sidecar_exchanges", REQUESTS, "", "outcome"),
    _Source("sidecar_models_unknown", REQUESTS, f"{REFUSED}unknown_model"),
    _Source("sidecar_bodies_unreadable", REQUESTS, REFUSED, "reason"),
)


def counts_of(tables: Iterable[Cells]) -> Counts:
    """Add up the tables of all processes of a proxy, as counter rows. Pure."""
    merged = merge_tables([source.family for source in SOURCES], tables)
    return {
        (source.stage, source.reason + "".join(labels)): int(cells[0])
        for source in SOURCES
        for labels, cells in merged[source.metric].items()
    }


def growth(before: Mapping[tuple[str, str], int], now: Counts) -> Counts:
    """Return by how much each count grew, without zeros. Pure."""
    grown = {key: number - before.get(key, 0) for key, number in now.items()}
    return {key: number for key, number in grown.items() if number > 0}


class DurableCounts:
    """`start`, then `stop`. One for each proxy, also for one of several workers."""

    def __init__(
        self, store_url: str, read: Callable[[], Sequence[Cells]], *, interval_s: float = INTERVAL_S
    ) -> None:
        """read: returns the metrics of all processes of the proxy."""
        self._store_url = store_url
        self._read = read
        self._interval_s = interval_s
        self._told: Counts = {}
        self._away = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Call it when no request is left."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        # Imported in the thread: the parent of several workers has no other use for SQLAlchemy.
        from sqlalchemy.exc import SQLAlchemyError

        from sidecar.store.engines import open_existing
        from sidecar.store.tables import add_counts

        engine = open_existing(self._store_url)
        while True:
            last = self._stopping.wait(self._interval_s)
            now = counts_of(self._read())
            grown = growth(self._told, now)
            if grown:
                try:
                    with engine.begin() as connection:
                        add_counts(connection, grown)
                except SQLAlchemyError as error:
                    self._say_away(str(error), lost=last)
                else:
                    self._told, self._away = now, False
            if last:
                break
        engine.dispose()

    def _say_away(self, why: str, *, lost: bool) -> None:
        if lost:
            # A store that never was there is a proxy's that learns nothing: no fault.
            (log.error if self._told else log.info)("counts_lost", why=why)
        elif not self._away:
            log.warning("counts_not_stored", again_in_s=self._interval_s, why=why)
        self._away = True
