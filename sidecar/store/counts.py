"""Add to the durable counters. Needs no ORM, so that a proxy can do it too."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection

from sidecar.store.tables import COUNTER


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
