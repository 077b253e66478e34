"""The judge's queue in the store: which group is judged next, and the counts of failed attempts.

`judging_since` marks a group that a worker is judging. Every outcome, good or bad, clears it, so a
mark that outlives its lease shows that a process died while it judged the group. The next claim
counts that as one attempt, and takes such groups ("suspects") one at a time: if one of them crashes
the process again, the failure counts against that group alone.
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
    """Groups that a worker has claimed."""

    group_ids: list[str]
    suspect: str | None = None
    """Id of the claimed group that a process died over, if any."""


def claim_for_judge(
    session: Session, *, limit: int, now: float, lease_s: float, suspects: bool = True
) -> Claimed:
    """Claim up to `limit` groups for `lease_s` seconds.

    Order: fewest failed attempts, then never tried, then longest wait.
    suspects: True when one of them may be a group that a process died over.
    Call it in a write transaction, like `claim_groups`.
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
    """Keep the claim on a group whose judging failed until the cause is known."""
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id, GroupRow.status == SAMPLED)
        .values(lease_until=until)
    )


def give_back(session: Session, group_id: str, *, until: float = 0.0) -> None:
    """Release a group unchanged; nobody may claim it before `until` (Unix seconds)."""
    session.execute(
        update(GroupRow)
        .where(GroupRow.group_id == group_id, GroupRow.status == SAMPLED)
        .values(lease_until=until, judging_since=None)
    )


def charge(session: Session, failed: Failed, *, now: float) -> bool:
    """Count a failed attempt that is the group's own fault; after too many, set the group aside.

    Returns: True when it was set aside now.
    """
    row = _waiting(session, failed.group_id)
    if row is None:
        return False
    row.judge_attempts = _attempts(row) + 1
    ended = _count_failure(row, failed.reason)
    return _put_back(session, row, failed, now=now, ended=ended or failed.final)


def doubt(session: Session, failed: Failed, *, now: float) -> bool:
    """Count a failed attempt of unknown cause; otherwise like `charge`."""
    row = _waiting(session, failed.group_id)
    if row is None:
        return False
    ended = _count_failure(row, UNPROVEN)
    return _put_back(session, row, failed, now=now, ended=ended)


def failures(row: GroupRow) -> dict[str, int]:
    """Return the group's failed attempts by reason. Unreadable entries are left out."""
    try:
        return msgspec.json.decode(row.judge_failures or "{}", type=dict[str, int])
    except (msgspec.MsgspecError, UnicodeError):
        return {}


def _attempts(row: GroupRow) -> int:
    """Return the group's failed attempts. A damaged number counts as none."""
    return row.judge_attempts if isinstance(row.judge_attempts, int) else 0


def _waiting(session: Session, group_id: str) -> GroupRow | None:
    return session.scalar(
        select(GroupRow)
        .where(GroupRow.group_id == group_id, GroupRow.status == SAMPLED)
        .with_for_update()  # its counts are read, then written
    )


def _count_failure(row: GroupRow, reason: str) -> bool:
    """Count one failure. Returns: True when the group has failed too often for this reason."""
    counts = failures(row)
    counts[reason] = counts.get(reason, 0) + 1
    row.judge_failures = msgspec.json.encode(counts).decode()
    return counts[reason] >= ATTEMPTS[reason]


def _put_back(session: Session, row: GroupRow, failed: Failed, *, now: float, ended: bool) -> bool:
    """Queue the group for its next attempt, or set it aside. Returns: True when set aside."""
    wait = wait_s(max(_attempts(row), failures(row).get(UNPROVEN, 0)))
    row.detail = failed.detail
    row.judging_since = None
    row.lease_until = now + max(wait, min(failed.retry_after_s, LONGEST_RETRY_AFTER_S))
    session.flush()
    return ended and set_aside(session, row.group_id, failed.reason, detail=failed.detail)


def _first_to_try_again(session: Session, left: Sequence[GroupRow]) -> GroupRow | None:
    """Return the first group, of those that a process died over, that may be tried again.

    The death counts as one more failure of it. Groups before it that have failed too often are set
    aside.
    """
    for row in left:
        row.judge_attempts = _attempts(row) + 1
        if not _count_failure(row, INTERRUPTED):
            return row
        session.flush()
        set_aside(session, row.group_id, INTERRUPTED, detail=INTERRUPTED_DETAIL)
    return None
