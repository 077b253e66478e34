"""Open the store, bring its schema up to date, and hand out transactions.

SQLite runs in WAL mode. A write transaction takes the write lock at its start (BEGIN IMMEDIATE): a
transaction that reads first and then writes fails at once when another process wrote in between.
Bytes of a text that are not UTF-8 are read as U+FFFD (`sidecar.store.existing`). JSON that cannot
be decoded is read as None.
"""

from __future__ import annotations

import json
import sqlite3
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import URL, Dialect, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DataError,
    DBAPIError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    SAWarning,
    SQLAlchemyError,
)
from sqlalchemy.orm import Session

from sidecar.errors import StoreError
from sidecar.hiding import hide_in_url
from sidecar.store.existing import REPLACEMENT, read_damaged_text
from sidecar.store.models import Base, CounterRow, FlagRow

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

BUSY_TIMEOUT_S = 15.0
"""How long a writer waits for the lock of another process before it gives up."""
MIGRATIONS = Path(__file__).with_name("migrations")
_OF_THE_STATEMENT = (DataError, IntegrityError, ProgrammingError)
"""Database errors whose cause is the statement or its values, not the store."""
DAMAGE = (zlib.error, msgspec.MsgspecError, ValueError, TypeError, OverflowError)
"""Errors of reading a row whose body, array, number or text is damaged."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """A store. Thread-safe; one per process."""

    def __init__(self, url: str) -> None:
        """Raises: StoreError when the URL or its file cannot be opened."""
        self.url = url
        self._shown_url = hide_in_url(url)
        try:
            refuse_bad_arguments(url)
            parsed = make_url(url)
            if parsed.get_backend_name() == "sqlite" and parsed.database:
                _make_private(Path(parsed.database))
            self._engine = _open(url)
        except OSError as error:
            raise StoreError(
                f"store {self._shown_url}: cannot be made or opened ({error.strerror}: "
                f"{error.filename}); make its folder writable, or set store.url"
            ) from error
        except ValueError as error:
            raise StoreError(f"store {self._shown_url}: {error}") from None
        self._writing = self._engine.execution_options(sidecar_begin="IMMEDIATE")

    @property
    def engine(self) -> Engine:
        return self._engine

    def upgrade(self) -> None:
        """Migrate the schema to this version's revision. Every process may call it at its start.

        Raises: StoreError.
        """
        # Imported here: a process that does not migrate need not wait for the import.
        from alembic import command
        from alembic.config import Config

        try:
            with self._writing.begin() as connection:
                config = Config()
                config.set_main_option("script_location", str(MIGRATIONS))
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise StoreError(
                f"store {self._shown_url}: cannot be upgraded: {_say(cause)}"
            ) from error

    def upgrade_if_behind(self) -> None:
        """Migrate an older schema. Imports Alembic only when it must, to save its import time."""
        newest = max(path.stem for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))
        with self.read() as session:
            try:
                present = session.scalar(text("SELECT version_num FROM alembic_version"))
            except OperationalError:  # no such table: an empty store
                present = None
        if present is None or present < newest:
            self.upgrade()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session for reading; it does not block writers. Raises: StoreError, as `write`."""
        with self._translated(), Session(self._engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session in one write transaction: commit at the end, roll back on any error.

        Raises: StoreError when the store is locked, full, read-only or away: try again later. Also
            when its file is damaged or not a database; the message says so.
        """
        with (
            self._translated(),
            Session(self._writing, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DatabaseError as error:
            if isinstance(error, _OF_THE_STATEMENT):
                raise
            raise StoreError(f"store {self._shown_url}: {_say(error.orig)}") from error

    def close(self) -> None:
        self._engine.dispose()


def refuse_bad_arguments(url: str) -> None:
    """Check a database URL and its parameters as the engine does. Opens no file and no connection.

    Raises: ValueError when the driver is missing or does not take a parameter: one line, which
    never quotes a value.
    """
    # `from None`: SQLAlchemy's errors quote the URL, and with it a password.
    try:
        parsed = make_url(url)
        kind = parsed.get_dialect()
        driver = kind.import_dbapi()
        dialect: Dialect = kind(dbapi=driver)  # type: ignore[call-arg]  # every dialect takes it
    except ImportError as error:
        raise ValueError(
            f"needs {error.name}, which is not installed; install it, or give "
            "sqlite:///path/to/store.db"
        ) from None
    except (ArgumentError, ValueError):
        raise ValueError("is no database URL; give sqlite:///path/to/store.db") from None
    if _are_taken(dialect, parsed):
        return
    alone = (name for name in parsed.query if not _are_taken(dialect, _with_only(parsed, name)))
    culprit = next(alone, "")
    what = f"parameter {culprit}" if culprit else "user, host, port or parameters"
    raise ValueError(f"its {what} is not what {dialect.driver} takes; correct it or leave it out")


def _with_only(url: URL, name: str) -> URL:
    return url.set(query={name: url.query[name]})


def _are_taken(dialect: Dialect, url: URL) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a parameter that would be left out without a word
            arguments, named = dialect.create_connect_args(url)
        if dialect.name == "sqlite" and dialect.driver == "pysqlite":
            dialect.connect(*[":memory:" for _ in arguments], **{**named, "uri": False}).close()
    except (ArgumentError, SAWarning, ValueError, TypeError, OverflowError):
        return False
    return True


def _make_private(path: Path) -> None:
    """Create a new file for its owner only: it holds prompts. SQLite's -wal gets the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)


def _open(url: str) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(
        url, connect_args={"timeout": BUSY_TIMEOUT_S}, json_deserializer=_read_json
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # Any: the driver's own types
        read_damaged_text(connection)
        connection.isolation_level = None  # the driver must not begin transactions by itself
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        mode = connection.get_execution_options().get("sidecar_begin", "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {mode}")

    return engine


def _read_json(stored: Any) -> Any:  # Any: JSON, or what a faulty disk left of it
    """Decode a JSON column. Damaged text is read as None, which no such column holds.

    An error here would fail each query that meets the row; so the row's reader decides.
    """
    try:
        return json.loads(stored)
    except (ValueError, TypeError, RecursionError):
        return None


def _say(cause: BaseException | None) -> str:
    """Describe an error of the database on one line; for a damaged file add what to do."""
    said = " ".join(str(cause).split())
    if getattr(cause, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:  # the low byte: its class
        return said
    return (
        f"{said}; the file is damaged or is no SQLite database: stop all processes, then restore "
        "it from a backup or salvage it with `sqlite3 FILE .recover`"
    )


def insert_into(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """Begin an INSERT that supports ON CONFLICT, in the dialect of the session's database."""
    # The engine has imported the dialect that is in use.
    if session.get_bind().dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def count(session: Session, stage: str, reason: str, by: int = 1) -> None:
    """Add `by` to a durable counter, in the caller's transaction."""
    if by == 0:
        return
    statement = insert_into(session, CounterRow).values(stage=stage, reason=reason, count=by)
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["stage", "reason"], set_={"count": CounterRow.count + by}
        )
    )


def get_flag(session: Session, name: str) -> str | None:
    """Read an operator's switch; None when it was never set."""
    row = session.get(FlagRow, name)
    return row.value if row is not None else None


def set_flag(session: Session, name: str, value: str, *, now: float) -> None:
    """Set an operator's switch, in the caller's transaction."""
    session.merge(FlagRow(name=name, value=value, updated_at=now))


def check_id(stored: str) -> str:
    """Return the id. Raises: ValueError when it is damaged: no query would find its row by it."""
    if REPLACEMENT in stored:
        raise ValueError(f"the id {stored!r} holds bytes that are not UTF-8")
    return stored


def compress(body: bytes) -> bytes:
    """Compress a body, at level 1: higher levels take longer and save little on JSON."""
    return zlib.compress(body, 1)


def decompress(data: bytes) -> bytes:
    """Undo `compress`. Raises: zlib.error."""
    return zlib.decompress(data)


__all__ = [
    "Base",
    "Database",
    "compress",
    "count",
    "decompress",
    "get_flag",
    "insert_into",
    "refuse_bad_arguments",
    "set_flag",
]
