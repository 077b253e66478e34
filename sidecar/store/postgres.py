"""How the store uses PostgreSQL: the driver, the limits of a connection, and the lock of writers.

Needs no ORM: a proxy uses it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

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
