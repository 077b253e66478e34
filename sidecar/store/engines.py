"""Engines of a store, SQLite or PostgreSQL: their options, types, URLs and errors. Needs no ORM."""

from __future__ import annotations

import sqlite3
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    JSON,
    URL,
    Boolean,
    Connection,
    Dialect,
    Engine,
    Float,
    Integer,
    LargeBinary,
    String,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    ProgrammingError,
    SAWarning,
)
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import GenericTypeCompiler
from sqlalchemy.types import TypeEngine

from sidecar.errors import DamagedColumnError, SettingsError
from sidecar.store.codec import from_json, storable_parameters, to_json
from sidecar.store.tables import JsonArray, JsonObject

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


# How the store uses PostgreSQL: the driver, the limits of a connection, and the lock of writers.

DRIVER = "psycopg"
INSTALL = "install it with `pip install 'learning-sidecar[postgres]'`"
CONNECT_TIMEOUT_S = 5
"""How long a connection may take; without a limit the kernel waits for two minutes."""
ANSWER_TIMEOUT_S = 20
"""How long a server that answers nothing counts as reachable (`tcp_user_timeout`)."""
IDLE_IN_TRANSACTION_S = 120
"""The server ends a transaction whose client sends nothing for this long: a stopped process must
not keep the lock of writers. The longest pause of a live one is the move of an adapter's files."""
RECYCLE_S = 1800.0
"""A pooled connection is replaced after this long; firewalls forget idle ones after an hour."""
WRITERS_LOCK = int.from_bytes(b"sidecar", "big")
"""Key of the advisory lock that `lock_writers` takes; one for each database."""
STATE = "sqlstate"
NO_TABLE, NO_PRIVILEGE, LOCK_TIMEOUT, DISK_FULL = "42P01", "42501", "55P03", "53100"
CONFLICTS = frozenset({"40001", "40P01"})
"""Serialization failure, deadlock: the transaction was rolled back, and may be repeated."""


def with_driver(url: str) -> URL:
    """Parse a store's URL. `postgresql://` and `postgres://` mean psycopg 3.

    Raises: sqlalchemy.exc.ArgumentError, ValueError.
    """
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername=f"postgresql+{DRIVER}")
    return parsed


def is_postgres(url: URL) -> bool:
    return url.get_backend_name() == "postgresql"


def open_postgres(url: URL, *, connections: int, wait_s: float, **options: Any) -> Engine:
    """Make an engine of at most `connections` connections. Connects at first use.

    wait_s: how long a statement waits for a lock, and a thread for a connection of the pool.
    """
    limits = {
        # A pooler in transaction mode gives each transaction another server connection, which does
        # not have the statements that the driver prepared on the one before.
        "prepare_threshold": None,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "tcp_user_timeout": ANSWER_TIMEOUT_S * 1000,
        "application_name": "learning-sidecar",
    }
    engine = create_engine(
        url,
        connect_args={name: value for name, value in limits.items() if name not in url.query},
        pool_size=connections,
        max_overflow=0,
        pool_timeout=wait_s,
        pool_recycle=RECYCLE_S,
        pool_pre_ping=True,  # a connection that died with its server is replaced before its use
        hide_parameters=True,  # errors are logged, and parameters hold what users wrote
        **options,
    )

    @event.listens_for(engine, "begin")
    def _limit(connection: Connection) -> None:
        # For each transaction: a pooler may give the next one another server connection. Not the
        # start-up parameter `options`, which poolers such as PgBouncer refuse.
        connection.exec_driver_sql(
            f"SET LOCAL lock_timeout = {int(wait_s * 1000)}; SET LOCAL "
            f"idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_S * 1000}"
        )

    return engine


def lock_writers(session: Session | Connection, *, alone: bool) -> None:
    """Take the lock of writers until the transaction ends.

    alone: no other writer runs meanwhile, as in SQLite. Else all that are not alone run together.
    """
    shared = "" if alone else "_shared"
    session.execute(text(f"SELECT pg_advisory_xact_lock{shared}({WRITERS_LOCK})"))


def state_of(error: BaseException | None) -> str:
    """Return the SQLSTATE of an error of the database; "" when it has none."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return getattr(cause, STATE, None) or ""


# Check a store's URL as its driver does, without a file or a connection. Needs no ORM.

EXAMPLES = "sqlite:///path/to/store.db or postgresql://user@host/database"


def dialect_of(url: str) -> tuple[URL, type[Dialect]]:
    """Parse a store's URL. Raises: ValueError, one line, which never quotes a value."""
    # `from None`: SQLAlchemy's errors quote the URL, and with it a password.
    try:
        parsed = with_driver(url)
        kind = parsed.get_dialect()
    except (ArgumentError, ValueError):
        raise ValueError(f"is no database URL; give {EXAMPLES}") from None
    if kind.name not in ("sqlite", "postgresql"):
        raise ValueError(f"is of {kind.name}; the store is SQLite or PostgreSQL: give {EXAMPLES}")
    return parsed, kind


def refuse_bad_arguments(url: str) -> None:
    """Check a database URL and its parameters as the engine does. Opens no file and no connection.

    Raises: ValueError, as `dialect_of`; also when the driver is missing or does not take a
    parameter.
    """
    parsed, kind = dialect_of(url)
    try:
        driver = kind.import_dbapi()
    except ImportError as error:
        what = INSTALL if is_postgres(parsed) else "install it"
        raise ValueError(
            f"needs {error.name or kind.driver}, which is not installed; {what}, or give "
            "sqlite:///path/to/store.db"
        ) from None
    dialect: Dialect = kind(dbapi=driver)  # type: ignore[call-arg]  # every dialect takes it
    if _are_taken(dialect, parsed):
        return
    alone = {name: parsed.set(query={name: value}) for name, value in parsed.query.items()}
    culprit = next((name for name, url in alone.items() if not _are_taken(dialect, url)), "")
    what = f"parameter {culprit}" if culprit else "user, host, port or parameters"
    raise ValueError(f"its {what} is not what {dialect.driver} takes; correct it or leave it out")


def _are_taken(dialect: Dialect, url: URL) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a parameter that would be left out without a word
            arguments, named = dialect.create_connect_args(url)
        if dialect.name == "sqlite" and dialect.driver == "pysqlite":
            dialect.connect(*[":memory:" for _ in arguments], **{**named, "uri": False}).close()
        if is_postgres(url) and dialect.driver == "psycopg":
            _check_by_libpq(named)
    except (ArgumentError, SAWarning, ValueError, TypeError, OverflowError):
        return False
    return True


def _check_by_libpq(named: Mapping[str, Any]) -> None:  # Any: as psycopg takes them
    """Raises: ValueError when libpq knows no such parameter."""
    from psycopg import ProgrammingError, conninfo

    known = {name: value for name, value in named.items() if name not in _OF_PSYCOPG}
    try:
        conninfo.make_conninfo("", **known)
    except ProgrammingError as error:
        raise ValueError(str(error)) from None


_OF_PSYCOPG = frozenset({"context"})
"""Arguments of `psycopg.connect` that libpq does not know."""


# Open a store that another process makes and migrates. Needs no ORM.

EXISTING_TIMEOUT_S = 1.0
"""How long a reader waits for a lock; it tries again at its next poll."""
EXISTING_CONNECTIONS = 2
"""A proxy reads in one thread and reports trips in another."""

MIGRATIONS = Path(__file__).with_name("migrations")


def newest_revision() -> str:
    """Return this release's revision of the schema."""
    return max(_revisions())


def baseline() -> str:
    """Return the oldest revision of the schema that this release can use."""
    return min(_revisions())


def _revisions() -> list[str]:
    return [path.stem for path in (MIGRATIONS / "versions").glob("[0-9]*.py")]


def open_existing(store_url: str) -> Engine:
    """Make an engine for a store that exists. Opens no file yet.

    Raises: SettingsError when the URL is not a database URL, or its driver is not installed.
    """
    try:
        url = with_driver(store_url)
        if is_postgres(url):
            return open_postgres(url, connections=EXISTING_CONNECTIONS, wait_s=EXISTING_TIMEOUT_S)
    except (ArgumentError, ValueError) as error:
        raise SettingsError("store.url: is not a database URL; see docs/settings.md") from error
    except ImportError as error:
        raise SettingsError(f"store.url: needs {error.name or 'psycopg'}; {INSTALL}") from None
    if url.get_backend_name() != "sqlite" or not url.database:
        raise SettingsError("store.url: names no SQLite file and no PostgreSQL database")
    # mode=rw: this process must not create the file. NullPool: each connection opens the file
    # anew, so a file that was replaced is followed.
    path = url.database if url.database.startswith("file:") else f"file:{url.database}"
    engine = create_engine(
        url.set(database=path, query={**url.query, "mode": "rw", "uri": "true"}),
        poolclass=NullPool,
        hide_parameters=True,  # errors are logged, and parameters hold what users wrote
        # One thread at a time uses a connection, but not always the thread that opened it.
        connect_args={"timeout": EXISTING_TIMEOUT_S, "check_same_thread": False},
    )

    event.listen(engine, "connect", lambda connection, _record: read_damaged_text(connection))
    return engine


def read_damaged_text(connection: Any) -> None:  # Any: the driver's own type
    """Have an SQLite connection read bytes that are not UTF-8 as U+FFFD.

    A damaged value is then a wrong value of its own row; by default the driver raises an error, and
    every query that meets the row fails.
    """
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")


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


# The types of SQLite, each of which refuses a value of another type.


def _checked(base: type[TypeEngine[Any]], *accepts: type) -> type[TypeEngine[Any]]:
    class Checked(base):  # type: ignore[misc,valid-type]  # a class that is known at run time
        def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
            decode = super().result_processor(dialect, coltype)

            def check(value: Any) -> Any:  # Any: what SQLite gives
                if value is None:
                    return None
                if type(value) not in accepts:
                    raise DamagedColumnError(f"holds {type(value).__name__}, not {accepts[0]}")
                return value if decode is None else decode(value)

            return check

    return Checked


def _checked_json(shape: type) -> type[TypeEngine[Any]]:
    class CheckedJson(JSON):
        def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
            def check(stored: Any) -> Any:  # Any: what SQLite gives
                return None if stored is None else checked_json(stored, shape)

            return check

    return CheckedJson


def checked_json(stored: object, shape: type) -> Any:  # Any: JSON
    """Return a JSON column's object or list. Raises: DamagedColumnError."""
    value = from_json(stored) if isinstance(stored, str) else stored
    if value is None and stored == "null":
        return None
    if not isinstance(value, shape):
        raise DamagedColumnError(f"holds no JSON {shape.__name__}")
    return value


class _StrictTypes(GenericTypeCompiler):
    """The types of columns by the names that STRICT tables take."""

    def visit_VARCHAR(self, type_: Any, **_: Any) -> str:
        return "TEXT"

    def visit_FLOAT(self, type_: Any, **_: Any) -> str:
        return "REAL"

    def visit_BOOLEAN(self, type_: Any, **_: Any) -> str:
        return "INTEGER"

    visit_BIGINT = visit_BOOLEAN
    visit_JSON = visit_VARCHAR


CHECKED: Final[Mapping[type, type]] = {
    String: _checked(String, str),
    Float: _checked(Float, float, int),
    Integer: _checked(Integer, int),
    Boolean: _checked(Boolean, int),
    LargeBinary: _checked(LargeBinary, bytes),
    JsonObject: _checked_json(dict),
    JsonArray: _checked_json(list),
}
"""For `Dialect.colspecs` of SQLite."""
NOT_UTF8: Final = "Could not decode to UTF-8"
"""How the driver's error begins that is about a text."""


class _Last(threading.local):
    statement = ""


LAST: Final = _Last()
"""The statement that this thread executed last: it names the tables that are looked through."""


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
        LAST.statement = statement
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
    engine.dialect.colspecs = {**engine.dialect.colspecs, **CHECKED}
    engine.dialect.type_compiler_instance = _StrictTypes(engine.dialect)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # Any: the driver's own types
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
