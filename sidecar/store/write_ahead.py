"""Empty the -wal file of a SQLite database, in which old bytes stand until it is used again.

A reader that holds a snapshot keeps the log from being emptied. SQLite holds the lock of writers
while it waits for readers, so each attempt waits for milliseconds or not at all, and is repeated.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final

WAIT_S: Final = 10.0
"""Over all attempts, when the log can be emptied later by running the same command again."""
PAUSE_S: Final = 0.1
"""Between two attempts; meanwhile others write."""


def empty_log(connection: sqlite3.Connection, *, wait_s: float, attempt_ms: int = 0) -> bool:
    """Write the log into the file and truncate it to nothing.

    wait_s: over all attempts.
    attempt_ms: how long one attempt waits for readers and writers, with the lock of writers held.
    Returns: False when somebody kept it for `wait_s`: then the log still holds old pages.
    """
    until = time.monotonic() + wait_s
    wait_ms = connection.execute("PRAGMA busy_timeout").fetchone()[0]
    connection.execute(f"PRAGMA busy_timeout={attempt_ms}")
    try:
        while True:
            try:
                # Copies what it can without the lock, so that TRUNCATE has little left to do.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.OperationalError:
                busy = 1
            if not busy:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(PAUSE_S)
    finally:
        connection.execute(f"PRAGMA busy_timeout={wait_ms}")
