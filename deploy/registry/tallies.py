"""The number of exchanges, from the durable counters: to count the rows would read them all."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.intake.consume import STAGE as CONSUME
from ingest.intake.consume import STORED
from sidecar.store.models import CounterRow


def exchanges(session: Session) -> int:
    """Return the number of exchanges that were ever stored. A damaged count is 0."""
    row = session.get(CounterRow, (CONSUME, STORED))
    return row.count if row is not None and isinstance(row.count, int) else 0


def of_stage(session: Session, stage: str) -> dict[str, int]:
    """Return the counters of one stage by reason, without zeros and damaged ones."""
    rows = session.scalars(
        select(CounterRow).where(CounterRow.stage == stage).order_by(CounterRow.reason)
    )
    return {row.reason: row.count for row in rows if isinstance(row.count, int) and row.count}
