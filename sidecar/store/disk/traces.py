"""Leave no byte of deleted rows in the files of a SQLite store.

Every connection overwrites what it deletes (`secure_delete`, `sidecar.store.engines`), so what is
left to do is to empty the log. A file that an older version has written holds what that one
deleted; it is rewritten once (VACUUM), while writers wait.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

from sidecar.errors import StoreError
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.disk.write_ahead import empty_log

FLAG = "overwrites_deleted"
"""Set in a store to which every writer has overwritten what it deleted."""
REWRITTEN_BYTES = 256 * 2**20
"""A larger file is rewritten only when it is asked for: writers wait for it."""


def remove_traces(database: Database, *, large_too: bool = False) -> str:
    """Remove what is left of deleted rows from the files of the store.

    large_too: rewrite a file over `REWRITTEN_BYTES` too.
    Returns: what is left, and what to do; "" when nothing is.
    """
    if database.engine.dialect.name != "sqlite":
        return (
            "PostgreSQL keeps deleted rows until a vacuum: run "
            "`VACUUM answer, answer_group, best_of_score, choice, dead_letter, exchange, feedback, "
            "gate_comparison, judge_call, signal` to have the "
            "space used again, `VACUUM FULL` to have it overwritten by the file system"
        )
    with database.read() as session:
        is_clean = get_flag(session, FLAG) is not None
    raw = database.engine.raw_connection()
    with closing(raw):
        connection = raw.driver_connection
        assert isinstance(connection, sqlite3.Connection)
        used = connection.execute("PRAGMA page_count").fetchone()[0]
        size = used * connection.execute("PRAGMA page_size").fetchone()[0]
        if not is_clean and (large_too or size <= REWRITTEN_BYTES):
            try:
                connection.execute("VACUUM")
            except sqlite3.Error as error:
                raise StoreError(f"the store cannot be rewritten: {error}; try again") from error
            is_clean = True
        emptied = empty_log(connection)
    if is_clean:
        with database.write() as session:
            set_flag(session, FLAG, "1", now=time.time())
    if not is_clean:
        return (
            f"its file of {size // 10**6} MB was written by an older version, which did not "
            "overwrite what it deleted: run this again with --vacuum; writers wait meanwhile"
        )
    return "" if emptied else "its -wal file is in use by a reader: run this again"
