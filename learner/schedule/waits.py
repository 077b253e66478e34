"""What a run waits for, as the store has it: canaries that are not decided, and users."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sidecar.capture.durable_counts import REQUESTS
from sidecar.store.models import AdapterRow, CanaryRow, CounterRow

UNDECIDED = ("loading", "gating", "ramping")


def undecided_canary(session: Session, model: str) -> str | None:
    """Return a version whose canary is active or still to come; None when all are decided.

    model: name of the line.
    """
    on_canary = select(CanaryRow.candidate).where(
        CanaryRow.model == model, CanaryRow.state.in_(UNDECIDED)
    )
    registered = select(AdapterRow.name).where(
        AdapterRow.model == model, AdapterRow.state == "registered"
    )
    return session.scalar(on_canary.limit(1)) or session.scalar(registered.limit(1))


def requests_of_users(session: Session) -> int:
    """Return the users' requests that the proxies have counted since the store was made."""
    total = session.scalar(select(func.sum(CounterRow.count)).where(CounterRow.stage == REQUESTS))
    return int(total or 0)
