"""The judge's queue in the store: which group is asked about next, and what failed attempts leave.

`judging_since` marks a group that a worker is asking about. Every end of that, good or bad, clears
it, so a mark that is still there when the lease has run out tells of a process that died in the
middle. The next claim counts that as one attempt, and takes such groups one at a time: if one of
them brings the process down, it alone is charged with that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ingest.judge_blame import ATTEMPTS, INTERRUPTED, Failed, wait_s
from ingest.store.groups import SAMPLED, set_aside
from ingest.store.models import GroupRow

INTERRUPTED_DETAIL = "the scoring process ended while the judge was asked about this group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Groups that a worker has now."""

    group_ids: list[str]
    suspect: str | None = None
    """The one of them that a process died over."""


def claim_for_judge(
    session: Session, *, limit: int, now: float, lease_s: float, suspects: bool = True
) -> Claimed:
    """Take up to `limit` groups for `lease_s` seconds: fewest failed attempts first, then those
    that were never tried, then the one that waits longest.

    suspects: whether one of them may be a group that a process died over.
    Call it in a write transaction, as `claim_groups`.
    """
    waiting = (
        select(GroupRow)
        .where(GroupRow.status == SAMPLED, GroupRow.lease_until <= now)
        .order_by(GroupRow.judge_attempts, GroupRow.lease_until, GroupRow.seq)
        .with_for_update(skip_locked=True)
    )
    rows = list(session.scalars(waiting.where(GroupRow.judging_since.is_(None)).limit(limit)))
    suspect = None
    if suspects and len(rows) < limit:
        left = waiting.where(GroupRow.judging_since.is_not(None)).limit(limit)
        suspect = _first_to_try_again(session, session.scalars(left).all())
    for row in [*rows, suspect] if suspect is not None else rows:
        row.lease_until = now + lease_s
        row.judging_since = now
    session.flush()
    names = [row.group_id for row in rows]
    if suspect is None:
        return Claimed(group_ids=names)
    return Claimed(group_ids=[*names, suspect.group_id], suspect=suspect.group_id)


def hold(session: Session, group_id: str, *, until: float) -> None:
    """Keep a group whose judging failed until it is known whose fault that was."""
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id, GroupRow.status == SAMPLED)
        .values(lease_until=until)
    )


def give_back(session: Session, group_id: str, *, until: float = 0.0) -> None:
    """Give a group back as it was; nobody is to take it before `until` (unix seconds)."""
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id, GroupRow.status == SAMPLED)
        .values(lease_until=until, judging_since=None)
    )


def charge(session: Session, failed: Failed, *, now: float) -> bool:
    """Count a failed attempt that is the group's own fault; after too many set the group aside.

    Returns: whether it was set aside now.
    """
    row = session.scalar(
        select(GroupRow).where(GroupRow.group_id == failed.group_id, GroupRow.status == SAMPLED)
    )
    if row is None:
        return False
    row.judge_attempts += 1
    row.detail = failed.detail
    row.judging_since = None
    row.lease_until = now + wait_s(row.judge_attempts)
    session.flush()
    if not failed.final and row.judge_attempts < ATTEMPTS[failed.reason]:
        return False
    return set_aside(session, failed.group_id, failed.reason, detail=failed.detail)


def _first_to_try_again(session: Session, left: Sequence[GroupRow]) -> GroupRow | None:
    """Of groups that a process died over, the first that may be tried again. It has failed once
    more; those before it have failed too often and are set aside."""
    for row in left:
        row.judge_attempts += 1
        if row.judge_attempts < ATTEMPTS[INTERRUPTED]:
            return row
        session.flush()
        set_aside(session, row.group_id, INTERRUPTED, detail=INTERRUPTED_DETAIL)
    return None
