"""Derive the routing table from the store's aliases and active canary, and write it.

The table is never edited in place: code that changes an alias or a canary calls `write` in the
same transaction, so a proxy sees either the whole decision or none of it. An unchanged table keeps
its generation, so a repeated call has no effect.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy.orm import Session

from deploy.registry import canaries, versions
from sidecar.records import BASE
from sidecar.routing.table import RoutingTable, decode_table, encode_table
from sidecar.store.models import RoutingRow


def current(session: Session, model: str) -> RoutingTable | None:
    """Return the table that proxies poll, or None when none was written yet."""
    row = session.get(RoutingRow, model)
    return decode_table(row.body) if row is not None else None


def write(session: Session, model: str, *, now: float) -> RoutingTable:
    """Derive the table from the store and write it. A changed table gets the next generation."""
    row = session.get(RoutingRow, model)
    before = decode_table(row.body) if row is not None else None
    after = _derive(session, model)
    if before is not None and replace(after, generation=before.generation) == before:
        return before
    after = replace(after, generation=1 if before is None else before.generation + 1)
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
                to=BASE,
                now=now,
                actor=actor,
                reason="first start",
            )
    session.flush()
    return write(session, model, now=now)


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
