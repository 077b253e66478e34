"""Empty the -wal file of a SQLite database, in which deleted bytes stand until it is used again."""

from __future__ import annotations

import sqlite3
import time

TRIES, PAUSE_S = 100, 0.1


def empty_log(connection: sqlite3.Connection) -> bool:
    """Write the log into the file and empty it.

    Tries for ten seconds, and never waits for a reader with the lock of writers in hand.
    Returns: False while somebody reads an older state.
    """
    wait_ms = connection.execute("PRAGMA busy_timeout").fetchone()[0]
    connection.execute("PRAGMA busy_timeout=0")
    try:
        for _ in range(TRIES):
            try:
                busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.OperationalError:
                busy = 1
            if not busy:
                return True
            time.sleep(PAUSE_S)
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout={wait_ms}")
