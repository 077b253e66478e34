"""Empty the write-ahead log of a SQLite store, which keeps old pages until it is emptied.

A reader that holds a snapshot keeps the log from being emptied. SQLite holds the write lock while
it waits for readers, so each attempt waits for a few milliseconds only, and is repeated.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Final

from sidecar.store.database import Database

ATTEMPT_MS: Final = 20
"""How long one attempt waits for readers and writers, with the write lock held."""
PAUSE_S: Final = 0.25
"""Between two attempts; meanwhile others write."""
WAIT_S: Final = 60.0
"""Over all attempts: reads of the sidecar's processes take seconds at most."""


def empty_log(database: Database, *, wait_s: float = WAIT_S) -> bool:
    """Write the log back to the database file and truncate it to nothing.

    Returns: False when a reader or a writer kept it for `wait_s`: then the log still holds old
        pages. True for PostgreSQL, which has no such file.
    """
    if database.engine.dialect.name != "sqlite":
        return True
    until = time.monotonic() + wait_s
    raw = database.engine.raw_connection()
    raw.detach()  # its time limit is changed, so it does not go back to the pool
    with closing(raw), closing(raw.cursor()) as cursor:
        cursor.execute(f"PRAGMA busy_timeout = {ATTEMPT_MS}")
        while True:
            # Copies what it can without the write lock, so that TRUNCATE has little left to do.
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            row = cursor.fetchone()
            if row is not None and row[0] == 0:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(PAUSE_S)
