"""Tables that a proxy reads or writes, and the metadata that all tables share. Needs no ORM.

These are SQLAlchemy Core tables because a proxy does without the ORM: importing it with all
models costs 0.3 s of CPU and 8 MB in every worker. `sidecar.store.models` maps its row classes onto
these tables, so each column has its name and its type here only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Float,
    Integer,
    MetaData,
    SQLColumnExpression,
    String,
    Table,
    Text,
    or_,
    true,
)

from sidecar.lines import Line

WIDE = BigInteger().with_variant(Integer(), "sqlite")
"""An integer of 64 bits: for row numbers, which at 2,000 exchanges a second pass 32 bits in twelve
days, and for what adds up. SQLite's INTEGER has 64 bits, and only that counts rows by itself."""


class JsonObject(JSON):
    """A JSON column that holds an object."""


class JsonArray(JSON):
    """A JSON column that holds an array."""


METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

ROUTING_TABLE = Table(
    "routing_table",
    METADATA,
    Column("model", String(255), primary_key=True),
    Column("generation", WIDE, nullable=False),
    Column("body", Text, nullable=False),
    Column("updated_at", Float, nullable=False),
)
"""The routing table of each public model name. Body: `sidecar.routing.table.encode_table`."""

BREAKER_TRIP = Table(
    "breaker_trip",
    METADATA,
    Column("model", String(255), primary_key=True),
    Column("canary", String(255), primary_key=True),
    Column("salt", String(64), primary_key=True),
    Column("at", Float, nullable=False),
    Column("reason", Text, nullable=False),
)
"""Canaries that the breaker of a proxy took out. Written by `sidecar.routing.breaker_report`."""

TABLE_TAKEN = Table(
    "table_taken",
    METADATA,
    Column("proxy", String(255), primary_key=True),
    Column("model", String(255), nullable=False),
    Column("generation", WIDE, nullable=False),
    Column("taken_at", Float, nullable=False),
)
"""The newest routing table that each process of a proxy took, and when. Written by
`sidecar.routing.source`."""

API_KEY = Table(
    "api_key",
    METADATA,
    Column("key_id", String(16), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(128), nullable=False),
    Column("secret_hash", String(64), nullable=False),
    Column("scopes", String(64), nullable=False),  # names with a blank between them
    Column("expires_at", Float),
    Column("requests_per_minute", Integer),
    Column("tokens_per_day", BigInteger),
    Column("best_of_max", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    # Grows by one with each change of any key: a proxy need only read the largest.
    Column("generation", WIDE, nullable=False, index=True),
)
"""Keys of the data plane. The store holds no key itself, only its hash."""

COUNTER = Table(
    "counter",
    METADATA,
    Column("stage", String(32), primary_key=True),
    Column("reason", String(64), primary_key=True),
    Column("count", WIDE, nullable=False),
)
"""Durable counts of where records went: (stage, reason) -> count."""


# Restrict a query to what is of one line of adapters (`sidecar.lines`).


def of_line(project: SQLColumnExpression[Any], line: Line) -> ColumnElement[bool]:
    """Return the condition that a row's project is of a line.

    project: the column; a null is of the default line.
    """
    if line.project is not None:
        return project == line.project
    if not line.others:
        return true()
    return or_(project.is_(None), project.not_in(sorted(line.others)))


# Add to the durable counters. Needs no ORM, so that a proxy can do it too.


def add_counts(connection: Connection, counts: Mapping[tuple[str, str], int]) -> None:
    """Add numbers to counters by (stage, reason), in the caller's transaction.

    Every transaction does it last and in one order, so no two wait for each other's rows.
    """
    rows = [
        {"stage": stage, "reason": reason, "count": by}
        for (stage, reason), by in sorted(counts.items())
        if by
    ]
    if not rows:
        return
    # The engine has imported the dialect that is in use.
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    statement = insert(COUNTER)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["stage", "reason"],
            set_={"count": COUNTER.c.count + statement.excluded.count},
        ),
        rows,
    )
