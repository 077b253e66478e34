"""Records that Kafka does not take, kept whole in a file of their own beside the outbox.

The proxy has no store to put them into. The file is bounded: the oldest go first, and all go at
the age of the store's dead letters.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import structlog

from sidecar.capture.outbox import OutboxRow

log = structlog.get_logger()
FILE = "dead-letters.db"
MAX_BYTES = 256 * 2**20
"""Payloads that are kept: six of the largest that a proxy captures by default."""
EXPIRED_ROWS = 5
"""Records that one transaction deletes by their age; each is over what a topic takes, 1 MB."""
INTERVAL_S = 3_600.0
"""Between two looks for records that are too old."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS dead_letter(
    exchange_id TEXT PRIMARY KEY, at REAL, reason TEXT, payload BLOB)"""


class DeadLetters:
    """Writes the file. One thread at a time."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, max_age_s: float | None = None
    ) -> None:
        """max_age_s: since the record was written to the outbox; None: it stays."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._due = 0.0

    def keep(self, row: OutboxRow, reason: str) -> bool:
        """Keep a record. A repeated one takes the place of the first.

        Returns: False when the file cannot be written; the record is lost then, and logged.
        """
        try:
            self._write(row, reason)
        except (sqlite3.Error, OSError) as error:
            log.error("dead_letter_lost", exchange_id=row.exchange_id, why=str(error))
            return False
        return True

    def expire(self, now: float) -> int:
        """Delete a few of the records that are too old, if it is time to look for them.

        now: Unix seconds. Returns: how many were deleted.
        """
        if self._max_age_s is None or now < self._due or not self._path.exists():
            return 0
        gone = 0
        try:
            gone = self._delete_before(now - self._max_age_s)
        except sqlite3.Error as error:
            log.warning("dead_letters_not_expired", why=str(error), again_in_s=INTERVAL_S)
        if gone < EXPIRED_ROWS:
            self._due = now + INTERVAL_S
        return gone

    def _delete_before(self, time: float) -> int:
        connection = sqlite3.connect(self._path)
        try:
            connection.execute("PRAGMA secure_delete=ON")
            with connection:
                connection.execute(_SCHEMA)
                return connection.execute(
                    "DELETE FROM dead_letter WHERE rowid IN "
                    "(SELECT rowid FROM dead_letter WHERE at < ? ORDER BY rowid LIMIT ?)",
                    (time, EXPIRED_ROWS),
                ).rowcount
        finally:
            connection.close()

    def _write(self, row: OutboxRow, reason: str) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)  # it contains what users wrote
        connection = sqlite3.connect(self._path)
        try:
            with connection:
                connection.execute(_SCHEMA)
                connection.execute(
                    "INSERT OR REPLACE INTO dead_letter VALUES (?, ?, ?, ?)",
                    (row.exchange_id, row.at, reason, row.payload),
                )
                self._bound(connection)
        finally:
            connection.close()

    def _bound(self, connection: sqlite3.Connection) -> None:
        sizes = connection.execute(
            "SELECT rowid, LENGTH(payload) FROM dead_letter ORDER BY rowid DESC"
        ).fetchall()
        size = 0
        for number, (rowid, length) in enumerate(sizes):
            size += length
            if number and size > self._max_bytes:
                connection.execute("DELETE FROM dead_letter WHERE rowid <= ?", (rowid,))
                return
