"""Numbers of exchanges, from the durable counters: to count the rows would read them all."""

from __future__ import annotations

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from ingest.intake.choose import STAGE as SELECTION
from ingest.intake.consume import STAGE as CONSUME
from ingest.intake.consume import STORED
from ingest.store.exchanges import NEW
from sidecar.store.models import CounterRow, ExchangeRow
from sidecar.store.models.capture import UNDECIDED


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


def exchanges_by_selection(session: Session) -> dict[str, int]:
    """Return the number of exchanges by what selection decided, and of those it has not seen.

    Those that wait to be seen are counted themselves: they are few while ingest works.
    """
    found = of_stage(session, SELECTION)
    waiting = session.scalar(
        select(func.count())
        .select_from(ExchangeRow)
        .where(ExchangeRow.selection == NEW, text(UNDECIDED))
    )
    return {**found, **({NEW: waiting} if waiting else {})}
