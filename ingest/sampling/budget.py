"""The daily budget of candidate tokens. It is kept in the store, so a restart does not renew it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import structlog
from sqlalchemy.orm import Session

from sidecar.store.database import count
from sidecar.store.models import CounterRow

STAGE = "sampling_tokens"
"""Counter rows: (stage, day) -> tokens."""
LARGEST = 2**53
"""A larger count is damage: no day has so many tokens."""

log = structlog.get_logger()


def day_of(now: float) -> str:
    """Return the UTC day of a time in Unix seconds, such as 2026-11-21."""
    return datetime.fromtimestamp(now, UTC).date().isoformat()


def next_midnight(now: float) -> datetime:
    """Return when the budget is renewed: the next midnight UTC."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today + timedelta(days=1)


def tokens_spent(session: Session, *, now: float) -> int:
    """Return the number of candidate tokens sampled today (UTC). A damaged number counts as 0."""
    row = session.get(CounterRow, (STAGE, day_of(now)))
    return row.count if row is not None and _is_count(row.count) else 0


def spend_tokens(session: Session, tokens: int, *, now: float) -> None:
    """Subtract sampled tokens from today's budget, in the caller's transaction.

    A damaged number begins again at 0: otherwise it would stay damaged, and today had no budget.
    """
    row = session.get(CounterRow, (STAGE, day_of(now)))
    if row is not None and not _is_count(row.count):
        log.warning("counter_unreadable", stage=STAGE, reason=row.reason)
        row.count = 0
        session.flush()
    count(session, STAGE, day_of(now), tokens)


def _is_count(stored: object) -> bool:
    return isinstance(stored, int) and 0 <= stored < LARGEST
