"""Check a store's URL as its driver does, without a file or a connection. Needs no ORM."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from sqlalchemy import URL, Dialect
from sqlalchemy.exc import ArgumentError, SAWarning

from sidecar.store.postgres import INSTALL, is_postgres, with_driver

EXAMPLES = "sqlite:///path/to/store.db or postgresql://user@host/database"


def refuse_bad_arguments(url: str) -> None:
    """Check a database URL and its parameters as the engine does. Opens no file and no connection.

    Raises: ValueError when the driver is missing or does not take a parameter: one line, which
    never quotes a value.
    """
    # `from None`: SQLAlchemy's errors quote the URL, and with it a password.
    try:
        parsed = with_driver(url)
        kind = parsed.get_dialect()
    except (ArgumentError, ValueError):
        raise ValueError(f"is no database URL; give {EXAMPLES}") from None
    if kind.name not in ("sqlite", "postgresql"):
        raise ValueError(f"is of {kind.name}; the store is SQLite or PostgreSQL: give {EXAMPLES}")
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
