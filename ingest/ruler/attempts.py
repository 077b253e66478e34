"""The judge's queue in the store: which group is asked about next, and what failed attempts leave.

`judging_since` marks a group that a worker is asking about. Every end of that, good or bad, clears
it, so a mark that is still there when the lease has run out tells of a process that died in the
middle. The next claim counts that as one attempt, and takes such groups one at a time: if one of
them brings the process down, it alone is charged with that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ingest.ruler.blame import ATTEMPTS, INTERRUPTED, UNPROVEN, Failed, wait_s
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S
from ingest.store.groups import SAMPLED, set_aside
from sidecar.store.models import GroupRow

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
    row = _waiting(session, failed.group_id)
    if row is None:
        return False
    row.judge_attempts += 1
    ended = _count_failure(row, failed.reason)
    return _put_back(session, row, failed, now=now, ended=ended or failed.final)


def doubt(session: Session, failed: Failed, *, now: float) -> bool:
    """Count a failed attempt of which nobody knows whose fault it is; as `charge`."""
    row = _waiting(session, failed.group_id)
    if row is None:
        return False
    ended = _count_failure(row, UNPROVEN)
    return _put_back(session, row, failed, now=now, ended=ended)


def newest_scored(session: Session) -> str | None:
    """The newest group that a judge has scored, to ask about again; None when there is none."""
    return session.scalar(
        select(GroupRow.group_id)
        .where(GroupRow.scored_at.is_not(None))
        .order_by(GroupRow.seq.desc())
        .limit(1)
    )


def failures(row: GroupRow) -> dict[str, int]:
    """The group's failed attempts by reason. What cannot be read counts for nothing."""
    try:
        return msgspec.json.decode(row.judge_failures or "{}", type=dict[str, int])
    except (msgspec.MsgspecError, UnicodeError):
        return {}


def _waiting(session: Session, group_id: str) -> GroupRow | None:
    return session.scalar(
        select(GroupRow).where(GroupRow.group_id == group_id, GroupRow.status == SAMPLED)
    )


def _count_failure(row: GroupRow, reason: str) -> bool:
    """Returns: whether the group has failed too often for this reason."""
    counts = failures(row)
    counts[reason] = counts.get(reason, 0) + 1
    row.judge_failures = msgspec.json.encode(counts).decode()
    return counts[reason] >= ATTEMPTS[reason]


def _put_back(session: Session, row: GroupRow, failed: Failed, *, now: float, ended: bool) -> bool:
    """Let the group wait for its next attempt, or set it aside. Returns: whether it was."""
    wait = wait_s(max(row.judge_attempts, failures(row).get(UNPROVEN, 0)))
    row.detail = failed.detail
    row.judging_since = None
    row.lease_until = now + max(wait, min(failed.retry_after_s, LONGEST_RETRY_AFTER_S))
    session.flush()
    return ended and set_aside(session, row.group_id, failed.reason, detail=failed.detail)


def _first_to_try_again(session: Session, left: Sequence[GroupRow]) -> GroupRow | None:
    """Of groups that a process died over, the first that may be tried again. It has failed once
    more; those before it have failed too often and are set aside."""
    for row in left:
        row.judge_attempts += 1
        if not _count_failure(row, INTERRUPTED):
            return row
        session.flush()
        set_aside(session, row.group_id, INTERRUPTED, detail=INTERRUPTED_DETAIL)
    return None
