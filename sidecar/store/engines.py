"""Make the engine of a store, SQLite or PostgreSQL, and tell what its errors mean. Needs no ORM."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    ProgrammingError,
)

from sidecar.store.existing import read_damaged_text
from sidecar.store.postgres import (
    DISK_FULL,
    LOCK_TIMEOUT,
    NO_PRIVILEGE,
    NO_TABLE,
    is_postgres,
    open_postgres,
    state_of,
)
from sidecar.store.values import from_json, storable_parameters, to_json

BUSY_TIMEOUT_S = 15.0
"""How long a writer waits for the lock of another process before it gives up."""
CONNECTIONS = 16
"""Connections of a process to PostgreSQL, at most: its server takes 100 by default, from all
processes. A thread that finds none free waits."""
_OF_THE_STATEMENT = (DataError, IntegrityError, ProgrammingError)
"""Database errors whose cause is the statement or its values, not the store."""
_OF_THE_VALUES = ("21", "22", "23", "42")
"""Classes of SQLSTATEs whose cause is the statement or its values. The other classes are of the
connection (26000: it has no such prepared statement), the server or its resources."""
_OF_THE_STORE = frozenset({NO_TABLE, NO_PRIVILEGE, "42P05"})
"""SQLSTATEs of these classes whose cause is the store all the same; 42P05: the connection has a
prepared statement of this name."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_WHAT_TO_DO = {
    sqlite3.SQLITE_FULL: "free space on the disk of its file, then try again",
    sqlite3.SQLITE_IOERR: "look whether the disk of its file is full, failing or gone",
    sqlite3.SQLITE_READONLY: "give this user the right to write its file and folder",
    sqlite3.SQLITE_CANTOPEN: "give this user the right to read and write its file and folder",
}
"""By the class of an SQLite error."""
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def open_engine(url: URL) -> Engine:
    """Make an engine; SQLite's file is made when it does not exist. Raises: OSError."""
    if is_postgres(url):
        engine = open_postgres(
            url,
            connections=CONNECTIONS,
            wait_s=BUSY_TIMEOUT_S,
            json_serializer=to_json,
            json_deserializer=from_json,
        )
    else:
        if url.database:
            _make_private(Path(url.database))
        engine = _open_sqlite(url)

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def _make_storable(
        _connection: Any,  # Any: what SQLAlchemy passes on is the driver's own
        _cursor: Any,
        statement: str,
        parameters: Any,
        _context: Any,
        _executemany: bool,  # also set for one statement that inserts many rows
    ) -> tuple[str, Any]:
        return statement, storable_parameters(parameters)

    return engine


def _make_private(path: Path) -> None:
    """Create a new file for its owner only: it holds prompts. SQLite's -wal gets the same mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)


def _open_sqlite(url: URL) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S},
        hide_parameters=True,  # errors are logged, and parameters hold what users wrote
        json_serializer=to_json,
        json_deserializer=from_json,
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # Any: the driver's own types
        read_damaged_text(connection)
        connection.isolation_level = None  # the driver must not begin transactions by itself
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
            # So that the file can be shortened; it has no effect once there are tables.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        # What is deleted or overwritten is not left in the file (`sidecar forget`).
        connection.execute("PRAGMA secure_delete=ON")
        connection.execute("PRAGMA journal_mode=WAL")
        # Each commit syncs the log to the disk, so what was stored survives a power cut. Ingest
        # relies on it: it deletes a record from the bus once the commit has returned.
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        mode = connection.get_execution_options().get("sidecar_begin", "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {mode}")

    return engine


def is_of_statement(error: Exception) -> bool:
    """Return True when the statement or its values are at fault, False when the store is."""
    state = state_of(error)
    if state and (not state.startswith(_OF_THE_VALUES) or state in _OF_THE_STORE):
        return False
    return isinstance(error, _OF_THE_STATEMENT)


def is_locked(error: Exception) -> bool:
    """Return True when another program has held the store's lock for `BUSY_TIMEOUT_S`."""
    return state_of(error) == LOCK_TIMEOUT or _class_of(_cause(error)) in _LOCKED


def _cause(error: Exception) -> BaseException:
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def _class_of(cause: BaseException) -> int:
    """Return the class of an SQLite error: the low byte of its code; 0 for another error."""
    code: int = getattr(cause, "sqlite_errorcode", 0)
    return code & 0xFF


def describe(error: Exception) -> str:
    """Describe an error of the database on one line, with what to do where that is known."""
    cause = _cause(error)
    # Without PostgreSQL's excerpt of the statement and of the row, which holds what users wrote.
    primary = getattr(getattr(cause, "diag", None), "message_primary", None)
    said = " ".join((primary or str(cause)).split())
    if _class_of(cause) in _DAMAGED:
        return (
            f"{said}; the file is damaged or is no SQLite database: stop all processes, then "
            "restore it from a backup or salvage it with `sqlite3 FILE .recover`"
        )
    if is_locked(error):
        where = "pg_stat_activity" if state_of(cause) else "`fuser` on its file"
        return (
            f"{said}: another program has held its lock for over {BUSY_TIMEOUT_S:.0f} s; {where} "
            "names it: end it, then try again"
        )
    if (to_do := _WHAT_TO_DO.get(_class_of(cause))) is not None:
        return f"{said}; {to_do}"
    if state_of(cause) == DISK_FULL:
        return f"{said}; free space on the disk of the database server, then try again"
    if state_of(cause) == NO_TABLE:
        return f"{said}; start ingest or control, which make the tables"
    return said
