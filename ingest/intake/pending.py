"""Count the groups that wait: how many exchanges may still be chosen depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from ingest.grouping.shares import Caller
from ingest.store.groups import CLAIMED, PENDING, SCORED
from sidecar.store.models import ExchangeRow, GroupRow


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
    some = select(GroupRow.status).where(*_waiting(live_adapters)).limit(most).subquery()
    statuses = (*PENDING, SCORED, CLAIMED)
    # Counted in one pass: a GROUP BY would sort what waits.
    row = session.execute(
        select(*(func.count().filter(some.c.status == status) for status in statuses)).select_from(
            some
        )
    ).one()
    return {status: number for status, number in zip(statuses, row, strict=True) if number}


def pending_by_caller(
    session: Session, live_adapters: Collection[str], *, most: int
) -> Counter[Caller]:
    """Count the same groups by who asked, up to `most` of them."""
    some = select(GroupRow.exchange_id).where(*_waiting(live_adapters)).limit(most).subquery()
    columns = (ExchangeRow.project, ExchangeRow.key_id, ExchangeRow.user)
    of_group = ExchangeRow.exchange_id == some.c.exchange_id
    return Counter(Caller(*row) for row in session.execute(select(*columns).join(some, of_group)))


def _waiting(live_adapters: Collection[str]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    waits = GroupRow.status.in_(PENDING)
    at_learner = GroupRow.status.in_((SCORED, CLAIMED)) & (GroupRow.learn_attempts == 0)
    for_learner = at_learner & GroupRow.adapter.in_(live_adapters)
    # The statuses stand alone too: SQLite searches no index for the terms of an OR.
    alive = GroupRow.status.in_((*PENDING, SCORED, CLAIMED))
    return alive, waits | for_learner
