"""Derive the routing table from the store's aliases and active canary, and write it.

The table is never edited in place: code that changes an alias or a canary calls `write` in the
same transaction, so a proxy sees either the whole decision or none of it. An unchanged table keeps
its generation, so a repeated call has no effect.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.records import Canary
from deploy.registry import canaries, versions
from sidecar.records import BASE
from sidecar.routing.table import (
    GENERATIONS,
    RoutingTable,
    decode_table,
    encode_table,
    is_generation,
)
from sidecar.store.database import DAMAGE
from sidecar.store.models import RoutingRow, TableTakenRow


def current(session: Session, model: str) -> RoutingTable | None:
    """Return the table that proxies poll; None when none was written yet or it is damaged."""
    row = session.get(RoutingRow, model)
    return _table(row) if row is not None else None


def write(session: Session, model: str, *, now: float) -> RoutingTable:
    """Derive the table from the store and write it. A changed table gets the next generation.

    A damaged table is written anew, so that it holds up neither a rollback nor a start.
    """
    row = session.get(RoutingRow, model)
    before = _table(row) if row is not None else None
    after = _derive(session, model)
    newest = 0 if row is None else _newest(session, row, before, now)
    if before is not None and replace(after, generation=newest) == before:
        return before
    after = replace(after, generation=min(newest + 1, GENERATIONS - 1))
    if row is None:
        row = RoutingRow(model=model)
        session.add(row)
    row.generation = after.generation
    row.body = encode_table(after)
    row.updated_at = now
    return after


def initialise(session: Session, model: str, *, now: float, actor: str) -> RoutingTable:
    """Prepare the store at the first start: both aliases point at the base.

    A later start changes nothing, unless the table and the store disagree.
    """
    known = versions.aliases_of(session, model)
    for alias in ("champion", "previous"):
        if alias not in known:
            versions.move_alias(
                session,
                model=model,
                alias=alias,
                to=versions.champion(session, model) if alias == "champion" else BASE,
                now=now,
                actor=actor,
                reason="first start",
            )
    session.flush()
    return write(session, model, now=now)


def _table(row: RoutingRow) -> RoutingTable | None:
    """Decode the body of a row. None: it is damaged; the table can be derived again."""
    try:
        return decode_table(row.body)
    except DAMAGE as error:
        _log_error("routing_table_damaged", model=row.model, why=f"{type(error).__name__}: {error}")
        return None


def _newest(session: Session, row: RoutingRow, table: RoutingTable | None, now: float) -> int:
    """Return a generation that no proxy has passed: a proxy never returns to a lower one.

    The body says it, the row's own column, and what each proxy told that it took; any of them may
    be damaged, or older than the others where a backup was restored. Where none can be read, the
    time in seconds is larger than any count of changes.
    """
    taken = select(TableTakenRow.generation).where(TableTakenRow.model == row.model)
    known: list[object] = [row.generation, *session.scalars(taken)]
    if table is not None:
        known.append(table.generation)
    return max((one for one in known if is_generation(one)), default=0) or int(now)


def agrees(table: RoutingTable, canary: Canary | None) -> bool:
    """Return True when the table gives the active canary the share that the store gives it.

    Each change of a canary writes the table in its own transaction, so they disagree only where a
    row was damaged since.
    """
    if canary is None or canary.weight_bp == 0:
        return table.canary is None
    return (table.canary, table.canary_weight_bp, table.salt) == (
        canary.candidate,
        canary.weight_bp,
        canary.salt,
    )


def _derive(session: Session, model: str) -> RoutingTable:
    session.flush()
    champion = versions.champion(session, model)
    canary = canaries.active(session, model)
    if canary is None or canary.weight_bp == 0:
        return RoutingTable(model=model, champion=champion)
    return RoutingTable(
        model=model,
        champion=champion,
        canary=canary.candidate,
        canary_weight_bp=canary.weight_bp,
        salt=canary.salt,
    )


def _log_error(event: str, **fields: str) -> None:
    """Log an error. An offline rollback must not wait for the import, which it seldom needs."""
    import structlog

    structlog.get_logger().error(event, **fields)
