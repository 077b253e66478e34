"""Count the groups that wait: how many exchanges may still be chosen depends on it."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.store.groups import CLAIMED, PENDING, SCORED
from sidecar.store.models import GroupRow


def count_pending(
    session: Session, live_adapters: Collection[str], *, most: int | None = None
) -> int:
    """Count the groups that wait for candidates, the judge or the learner, or are being trained on.

    most: counting ends there, because groups of best-of-N requests may wait without limit; None:
        all are counted.

    live_adapters: a group at the learner counts only when one of these sampled it. A group of an
        older adapter may be too stale to be trained on, and must not keep fresh groups out. For
        the same reason a group does not count on which a training run failed.
    """
    return sum(pending_by_status(session, live_adapters, most=most).values())


def pending_by_status(
    session: Session, live_adapters: Collection[str], *, most: int | None = None
) -> dict[str, int]:
    """Count the same groups by their status; a status without one is left out."""
    waits = GroupRow.status.in_(PENDING)
    at_learner = GroupRow.status.in_((SCORED, CLAIMED)) & (GroupRow.learn_attempts == 0)
    for_learner = at_learner & GroupRow.adapter.in_(live_adapters)
    # The statuses stand alone too: SQLite searches no index for the terms of an OR.
    alive = GroupRow.status.in_((*PENDING, SCORED, CLAIMED))
    some = select(GroupRow.status).where(alive, waits | for_learner).limit(most).subquery()
    statuses = (*PENDING, SCORED, CLAIMED)
    # Counted in one pass: a GROUP BY would sort what waits.
    row = session.execute(
        select(*(func.count().filter(some.c.status == status) for status in statuses)).select_from(
            some
        )
    ).one()
    return {status: number for status, number in zip(statuses, row, strict=True) if number}
