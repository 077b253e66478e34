"""Open the store, bring its schema up to date, and hand out transactions.

The store is SQLite or PostgreSQL; callers need not know which. On both, a write transaction is
alone by default: what it reads stays true until it commits. SQLite's write lock does that (BEGIN
IMMEDIATE, in WAL mode); on PostgreSQL an advisory lock does (`sidecar.store.engines`), and
transactions that say `alone=False` run together there. A reader sees one state of the store from
its first query to its last, and waits for nobody.

Values are stored alike (`sidecar.store.codec`), and read as what their columns hold, or not at all
(`sidecar.store.quarantine`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from random import Random
from typing import TYPE_CHECKING, TypeVar

import msgspec
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import (
    DBAPIError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
    TimeoutError as NoConnectionError,
)
from sqlalchemy.orm import Session

from sidecar.backoff import Backoff
from sidecar.errors import (
    DamagedColumnError,
    StoreBusyError,
    StoreError,
    StoreLockedError,
    StoreNewerError,
    StoreOlderError,
)
from sidecar.hiding import hide_in_url
from sidecar.store.contents import ContentCache
from sidecar.store.engines import (
    CONFLICTS,
    LAST,
    MIGRATIONS,
    NO_TABLE,
    NOT_UTF8,
    baseline,
    describe,
    is_locked,
    is_of_statement,
    is_postgres,
    lock_writers,
    newest_revision,
    open_engine,
    refuse_bad_arguments,
    state_of,
    with_driver,
)
from sidecar.store.keyring import NO_KEYS, Keyring
from sidecar.store.models import Base, FlagRow
from sidecar.store.quarantine import damaged_rows, put_into_quarantine
from sidecar.store.tables import add_counts

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

_STATISTICS = ("sqlite_stat1", "sqlite_stat4")
"""Tables of SQLite's ANALYZE. Statistics of a store that has grown since make its planner read
whole tables (docs/log.md, 2026-11-22), and fresh ones choose no better plan than none."""
DAMAGE = (zlib.error, msgspec.MsgspecError, ValueError, TypeError, OverflowError)
"""Errors of reading a row whose body, array or word is damaged."""
ATTEMPTS = 5
"""Attempts of `Database.repeat` at a transaction that conflicts with others."""
PAUSES = Backoff(first_s=0.02, last_s=0.5, jitter=0.5)
"""Pauses between these attempts: a transaction takes 1 to 50 ms."""

Result = TypeVar("Result")


class Database:
    """A store. Thread-safe; one per process."""

    def __init__(self, url: str, keyring: Keyring = NO_KEYS) -> None:
        """keyring: encrypts and decrypts what exchanges say.

        Raises: StoreError when the URL or its file cannot be opened.
        """
        self.keyring = keyring
        self.url = url
        self._shown_url = hide_in_url(url)
        try:
            refuse_bad_arguments(url)
            parsed = with_driver(url)
            self._engine = open_engine(parsed)
        except OSError as error:
            raise StoreError(
                f"store {self._shown_url}: cannot be made or opened ({error.strerror}: "
                f"{error.filename}); make its folder writable, or set store.url"
            ) from error
        except ValueError as error:
            raise StoreError(f"store {self._shown_url}: {error}") from None
        self._info = {ContentCache: ContentCache(), Keyring: keyring}
        self._has_row_locks = is_postgres(parsed)
        if self._has_row_locks:
            # A writer sees what was committed until it got the lock, so not one state from its
            # beginning; said here, because a database may have another default.
            self._writing = self._engine.execution_options(isolation_level="READ COMMITTED")
            self._reading = self._engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        else:
            self._writing = self._engine.execution_options(sidecar_begin="IMMEDIATE")
            self._reading = self._engine.execution_options()
        self._rng = Random()

    @property
    def engine(self) -> Engine:
        return self._engine

    def check_revision(self, present: str | None) -> None:
        """Raises: StoreNewerError or StoreOlderError when this release cannot use the revision."""
        if present is None:
            return
        if present < baseline():
            raise StoreOlderError(
                f"store {self._shown_url}: its schema {present} is older than {baseline()}, the "
                f"oldest that can be upgraded; first run ingest of the last commit that has the "
                f"migration {present}: it upgrades the store to {baseline()}"
            )
        if present > newest_revision():
            raise StoreNewerError(
                f"store {self._shown_url}: a newer release has migrated it ({present}; this one "
                f"knows {newest_revision()}); install that release, or restore the backup made "
                "before its first start"
            )

    def upgrade(self) -> None:
        """Make the tables, or migrate them to this release's revision. Every process may call it at
        its start.

        Statistics that somebody made for SQLite's planner are removed: see `_STATISTICS`.

        Raises: StoreError.
        """
        self.check_revision(self.revision())
        # Imported here: a process that does not migrate need not wait for the import.
        from alembic import command
        from alembic.config import Config

        try:
            with self._writing.begin() as connection:
                if self._has_row_locks:
                    lock_writers(connection, alone=True)  # one process migrates, the others wait
                    self._check_encoding(connection.scalar(text("SHOW server_encoding")))
                config = Config()
                config.set_main_option("script_location", str(MIGRATIONS))
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
                if connection.dialect.name == "sqlite":
                    for name in _STATISTICS:
                        connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name}")
        except SQLAlchemyError as error:
            raise _kind(error)(
                f"store {self._shown_url}: cannot be upgraded: {describe(error)}"
            ) from error

    def _check_encoding(self, name: str | None) -> None:
        if name != "UTF8":
            raise StoreError(
                f"store {self._shown_url}: its encoding is {name}, which cannot hold every text; "
                "make a database with `createdb --encoding UTF8 --template template0 NAME`"
            )

    def upgrade_if_behind(self) -> None:
        """Migrate an older schema. Imports Alembic only when it must, to save its import time."""
        if self.revision() != newest_revision():
            self.upgrade()

    def revision(self) -> str | None:
        """Return the schema's revision; None for a store without tables. Raises: StoreError."""
        with self._translated(), Session(self._engine) as session:
            try:
                present = session.scalar(text("SELECT version_num FROM alembic_version"))
            except (OperationalError, ProgrammingError) as error:  # no such table: an empty store
                if self._has_row_locks and state_of(error) != NO_TABLE:
                    raise
                return None
        return None if present is None else str(present)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session for reading; it does not block writers. Raises: StoreError, as `write`."""
        with (
            self._translated(),
            Session(self._reading, expire_on_commit=False, info=self._info) as session,
        ):
            yield session

    @contextmanager
    def write(self, *, alone: bool = True) -> Iterator[Session]:
        """Open a session in one write transaction: commit at the end, roll back on any error.

        alone: False for a transaction that is right beside others of its kind: it changes rows
            only by conditions that their locks protect. On SQLite every writer is alone.
        Raises: StoreBusyError when it conflicts with another transaction: repeat it.
            StoreLockedError when another program holds the lock: wait, or end that program.
            StoreError when the store is full, read-only or away: try again later. Also when its
            file is damaged or not a database; the message says so.
        """
        with (
            self._translated(),
            Session(self._writing, expire_on_commit=False, info=self._info) as session,
            session.begin(),
        ):
            if self._has_row_locks:
                lock_writers(session, alone=alone)
            yield session
            save_counts(session)

    def repeat(self, work: Callable[[Session], Result], *, alone: bool = True) -> Result:
        """Run `work` in a write transaction; again, a few times, when that conflicts with others.

        work: may run several times; it changes nothing but the store.
        Raises: StoreError, as `write`.
        """
        for attempt in range(1, ATTEMPTS):
            try:
                with self.write(alone=alone) as session:
                    return work(session)
            except StoreBusyError:
                time.sleep(PAUSES.wait_s(attempt, self._rng))
        with self.write(alone=alone) as session:
            return work(session)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DamagedColumnError as error:
            raise self._quarantined(error) from error
        except (DBAPIError, NoConnectionError) as error:
            if is_of_statement(error):
                raise
            if NOT_UTF8 in str(error):
                raise self._quarantined(error) from error
            raise _kind(error)(f"store {self._shown_url}: {describe(error)}") from error

    def _quarantined(self, error: Exception) -> StoreError:
        """Put the damaged rows into quarantine. Returns: the error that has the caller repeat."""
        with closing(self._engine.raw_connection()) as raw:
            found = damaged_rows(raw.driver_connection, LAST.statement)
        with self.write() as session:
            number = put_into_quarantine(session, found, now=time.time())
        if not number:
            return StoreError(f"store {self._shown_url}: {error}")
        return StoreBusyError(
            f"store {self._shown_url}: damaged rows went into quarantine: {number}; repeat this"
        )

    def close(self) -> None:
        self._engine.dispose()


def _kind(error: Exception) -> type[StoreError]:
    if state_of(error) in CONFLICTS:
        return StoreBusyError
    return StoreLockedError if is_locked(error) else StoreError


def insert_into(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """Begin an INSERT that supports ON CONFLICT, in the dialect of the session's database."""
    # The engine has imported the dialect that is in use.
    if session.get_bind().dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def count(session: Session, stage: str, reason: str, by: int = 1) -> None:
    """Add `by` to a durable counter, in the caller's transaction.

    The session adds up its counts, and stores them last (`save_counts`).
    """
    counts: dict[tuple[str, str], int] = session.info.setdefault(_COUNTS, {})
    key = (stage[:_STAGE], reason[:_REASON])
    counts[key] = counts.get(key, 0) + by


_COUNTS = "sidecar_counts"
_STAGE, _REASON = 32, 64
"""Characters of the columns."""


def save_counts(session: Session) -> None:
    """Store what `count` added up. `Database.write` calls it before it commits."""
    counts: dict[tuple[str, str], int] = session.info.pop(_COUNTS, {})
    if any(counts.values()):
        session.flush()  # what is still to be written locks its rows before the counters
        add_counts(session.connection(), counts)


def get_flag(session: Session, name: str) -> str | None:
    """Read an operator's switch; None when it was never set."""
    return session.scalar(select(FlagRow.value).where(FlagRow.name == name))


def set_flag(session: Session, name: str, value: str, *, now: float) -> None:
    """Set an operator's switch, in the caller's transaction."""
    statement = insert_into(session, FlagRow).values(name=name, value=value, updated_at=now)
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["name"], set_={"value": value, "updated_at": now}
        )
    )


def compress(body: bytes) -> bytes:
    """Compress a body, at level 1: higher levels take longer and save little on JSON."""
    return zlib.compress(body, 1)


def decompress(data: bytes) -> bytes:
    """Undo `compress`. Raises: zlib.error."""
    return zlib.decompress(data)
