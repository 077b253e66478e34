"""Open a store that another process makes and migrates. Needs no ORM."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from sidecar.errors import SettingsError
from sidecar.store.postgres import INSTALL, is_postgres, open_postgres, with_driver
from sidecar.store.values import REPLACEMENT

BUSY_TIMEOUT_S = 1.0
"""How long a reader waits for a lock; it tries again at its next poll."""
CONNECTIONS = 2
"""A proxy reads in one thread and reports trips in another."""

MIGRATIONS = Path(__file__).with_name("migrations")

__all__ = ["REPLACEMENT", "newest_revision", "open_existing", "read_damaged_text"]


def newest_revision() -> str:
    """Return this release's revision of the schema."""
    return max(path.stem for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def open_existing(store_url: str) -> Engine:
    """Make an engine for a store that exists. Opens no file yet.

    Raises: SettingsError when the URL is not a database URL, or its driver is not installed.
    """
    try:
        url = with_driver(store_url)
        if is_postgres(url):
            return open_postgres(url, connections=CONNECTIONS, wait_s=BUSY_TIMEOUT_S)
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
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # Any: the driver's own types
        read_damaged_text(connection)

    return engine


def read_damaged_text(connection: Any) -> None:  # Any: the driver's own type
    """Have an SQLite connection read bytes that are not UTF-8 as U+FFFD.

    A damaged value is then a wrong value of its own row; by default the driver raises an error, and
    every query that meets the row fails.
    """
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
