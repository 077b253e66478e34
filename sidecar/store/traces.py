"""Leave no byte of deleted rows, or of replaced values, in the files of a SQLite store.

Every connection overwrites what it deletes (`secure_delete`, `sidecar.store.engines`), so what is
left to do is to empty the log. The file is rewritten (VACUUM), while writers wait, when it was
written by an older version, which left what it deleted, and after rows were deleted or values grew
in place (`mark_replaced`): SQLite moves rows to other pages and leaves copies between the rows.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from sqlalchemy import delete, update
from sqlalchemy.orm import Session

from sidecar.errors import StoreError
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.models import FlagRow
from sidecar.store.write_ahead import WAIT_S, empty_log

FLAG = "overwrites_deleted"
"""`REWRITTEN` in a store to which every writer has overwritten what it deleted, since it was
rewritten; `REWRITING` until the file is written."""
REWRITTEN, REWRITING = "1", "0"
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
            "gate_comparison, judge_call, judge_reply, signal` to have the "
            "space used again, `VACUUM FULL` to have it overwritten by the file system"
        )
    megabytes = rewrite(database, large_too=large_too)
    if megabytes:
        return (
            f"its file of {megabytes} MB may hold what was deleted or replaced: run this again "
            "with --vacuum; writers wait meanwhile"
        )
    emptied = empty_store_log(database, wait_s=WAIT_S)
    return "" if emptied else "its -wal file is in use by a reader: run this again"


def empty_store_log(database: Database, *, wait_s: float, attempt_ms: int = 0) -> bool:
    """Empty the log of a store in SQLite, as `empty_log`. True for PostgreSQL, which has no such
    file."""
    if database.engine.dialect.name != "sqlite":
        return True
    with _connection(database) as connection:
        return empty_log(connection, wait_s=wait_s, attempt_ms=attempt_ms)


def mark_replaced(session: Session) -> None:
    """Note that values were replaced by longer ones, or rows deleted: `rewrite` has to rewrite the
    file."""
    session.execute(delete(FlagRow).where(FlagRow.name == FLAG))


def rewrite(database: Database, *, large_too: bool = False) -> int:
    """Rewrite the file of a SQLite store when copies of old values may be in it.

    The log is not emptied. large_too: as in `remove_traces`.
    Returns: 0; or the size in MB of a file that was too large and is left as it is.
    Raises: StoreError when others keep it from being rewritten.
    """
    with database.read() as session:
        if get_flag(session, FLAG) == REWRITTEN:
            return 0
    with _connection(database) as connection:
        used = connection.execute("PRAGMA page_count").fetchone()[0]
        size: int = used * connection.execute("PRAGMA page_size").fetchone()[0]
        if size > REWRITTEN_BYTES and not large_too:
            return max(1, size // 10**6)
        with database.write() as session:
            set_flag(session, FLAG, REWRITING, now=time.time())
        try:
            connection.execute("VACUUM")
        except sqlite3.Error as error:
            raise StoreError(f"the store cannot be rewritten: {error}; try again") from error
    with database.write() as session:
        # Who has deleted rows since then has taken the mark away: the next call rewrites it again.
        session.execute(
            update(FlagRow)
            .where(FlagRow.name == FLAG)
            .values(value=REWRITTEN, updated_at=time.time())
        )
    return 0


@contextmanager
def _connection(database: Database) -> Iterator[sqlite3.Connection]:
    raw = database.engine.raw_connection()
    with closing(raw):
        connection = raw.driver_connection
        assert isinstance(connection, sqlite3.Connection)
        yield connection
