"""Records that Kafka does not take, kept whole in a file of their own beside the outbox.

The proxy has no store to put them into. The file is bounded: the oldest go first.
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
_SCHEMA = """CREATE TABLE IF NOT EXISTS dead_letter(
    exchange_id TEXT PRIMARY KEY, at REAL, reason TEXT, payload BLOB)"""


class DeadLetters:
    """Writes the file. One thread at a time."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

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

    def _write(self, row: OutboxRow, reason: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
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
