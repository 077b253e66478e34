"""Decide who caused a failed judge call: the group or the judge? Pure: the caller has the clock.

The error itself does not tell. A content filter answers 403 to one group, a wrong key answers 403
to all; a prompt that crashes the judge's worker looks like an outage. So a group that failed is
held until there is evidence, of three kinds:

- A real group is scored afterwards: the failure was the held group's own and counts as an attempt.
  When nothing else is in flight, the caller judges a group again that was scored before.
- The judge fails on that group and on the sum question (`ingest.ruler.outage`) too: an outage.
  Nothing counts.
- The judge answers the sum question only. That proves nothing about real groups: each failure
  counts as unproven, and a group may have many of these, over days. When many groups in a row fail
  like this, the judge is taken to fail on all real groups: an outage.

In an outage one group is judged at a time, after growing waits. So an outage costs at most the
calls in flight when it began, `FAILED_IN_A_ROW` calls if the judge still answers the sum question,
and one call for each wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.ruler.judge import ERROR_CHARACTERS, storable
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S, Outage
from ingest.ruler.ruler import GroupOutcome, SetAside, Unanswered
from ingest.store.groups import SAMPLED, set_aside
from ingest.verifiers import records as verifiers
from sidecar.backoff import Backoff
from sidecar.store.models import GroupRow

DEFECT = "judge_defect"
"""Reason: the sidecar's own code failed on the group."""
INTERRUPTED = "judge_interrupted"
"""Reason: the process died while the group was being judged."""
UNPROVEN = "unproven"
"""Reason: the judge failed on the group but answered the sum question, so the cause is unknown."""
UNVERIFIED = verifiers.UNVERIFIED
"""Reason: a verifier failed over the group, whose settings let it wait (`on_error = "hold"`)."""
ATTEMPTS = {
    JudgeRejectedError.reason: 3,
    JudgeNoCreditError.reason: 3,
    JudgeGarbledError.reason: 3,
    DEFECT: 3,
    INTERRUPTED: 5,
    JudgeUnavailableError.reason: 10,
    JudgeBusyError.reason: 30,
    UNVERIFIED: 30,
    UNPROVEN: 100,
}
"""Failed attempts for one reason after which a group is set aside; each reason has its own count.
The less an error tells about the group, the more attempts: where half of all calls fail by chance,
one good group in 1,000 fails ten in a row."""
WAITS = Backoff(first_s=5.0, last_s=3600.0)
"""A group's wait after its first failed attempt, doubling up to the longest. Ten attempts take 43
minutes, thirty take 21 hours, a hundred take 91 hours: longer than a weekend."""
LIMITED_WAITS = 5
"""Waits for a rate limit after which a probe tests whether the group is too large for the limit."""
MOST_LIMITED = 1_000
FAILED_IN_A_ROW = 24
"""Consecutive unproven failures after which the judge is taken to fail on all groups. Fewer would
let a few bad groups at the front of the queue slow down all others."""
SEVERAL = 3
"""Different failed groups that are enough instead once one of them has failed twice: groups that
never failed go first, so none of those is left."""
IDLE_S = 10.0
"""When no group was tried so long after the wait of an outage, none waits, and the judge is probed.
Those that failed last may be claimed 5 s after the wait."""
UNUSABLE_IN_A_ROW = 3
"""Consecutive groups that the judge may refuse for good (too long, unusable reply twice) without a
check. Then a probe must show that the judge does not refuse everything; it is sent at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A group whose judging failed, held until the cause is known."""

    group_id: str
    reason: str
    detail: str
    final: bool = False
    """True: set aside without further attempts once the failure is proven the group's own."""
    retry_after_s: float = 0.0
    """Pause that the judge asked for before the next attempt, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """Evidence that the judge works."""

    own_faults: tuple[Failed, ...]
    outage_s: float | None
    """Duration of the outage that this ended, in seconds; None when there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """Evidence that the judge answers the sum question, but maybe no real group."""

    unproven: tuple[Failed, ...]
    all_fail: bool
    """True when so many groups have failed that the judge is taken to fail on all: an outage."""
    outage_s: float | None
    """Same as `Cleared.outage_s`."""


class Blame:
    """Evidence about one judge, from the calls of one worker."""

    def __init__(self) -> None:
        self.outage = Outage()
        self._held: dict[str, Failed] = {}
        self._unproven: dict[str, Failed] = {}
        """Groups that failed since the last scored one, though the sum question was answered."""
        self._in_a_row = 0
        self._all_fail = False
        self._limited: dict[str, Failed] = {}
        """Groups that met a rate limit of requests or tokens, by id. They are not held."""
        self._met_alone: set[str] = set()
        """Groups that met a rate limit while later ones did not."""
        self._limited_waits = 0
        self._open = False
        self._unusable = 0
        self._quiet_until = 0.0

    def begin(self) -> None:
        """Ask for a probe before the first group: nothing is known of the judge."""
        self._open = True

    def room(self, most: int, now: float) -> int:
        """Return how many groups may be in flight: `most`, one to test the judge again, or none."""
        if self._open or now < self._quiet_until:
            return 0
        if not self.outage.lasts:
            return most
        return 1 if now >= self.outage.retry_at else 0

    def wants_probe(self, now: float) -> bool:
        """Return True when a probe is due, provided that no other call is in flight."""
        if not self._open and (self._all_fail or not self.outage.lasts):
            return False  # a judge that is good for a sum only is not asked for sums
        due_at = max(self.outage.retry_at, self._quiet_until)
        return now >= (due_at if self._open else due_at + IDLE_S)

    def failed(self, failed: Failed, now: float) -> bool:
        """Note a group without a usable answer. Returns: True when a pause for all begins now."""
        # A group pauses the others once: at its next limit a probe tells whether it is too large.
        if failed.reason != JudgeBusyError.reason or failed.group_id in self._met_alone:
            self._held[failed.group_id] = failed
            self._open = True
            return False
        # A probe uses up part of the rate limit, so it is sent only after many waits.
        self._limited_waits += now >= self.outage.retry_at
        self._open = self._open or self._limited_waits > LIMITED_WAITS
        if len(self._limited) < MOST_LIMITED:
            self._limited[failed.group_id] = failed
        # The pause also holds when other calls are still answered: the rate limiter asked for it.
        quiet_s = min(failed.retry_after_s, LONGEST_RETRY_AFTER_S)
        self._quiet_until = max(self._quiet_until, now + quiet_s)
        return self.outage.unanswered(now, retry_after_s=failed.retry_after_s)

    def holds(self, group_id: str) -> bool:
        return group_id in self._held

    def failure(self, group_id: str, outcome: GroupOutcome) -> Failed | None:
        """Return the failure of an outcome, to be blamed on the group or the judge; None: final."""
        if isinstance(outcome, Unanswered):
            return Failed(
                group_id=group_id,
                reason=outcome.reason,
                detail=outcome.detail,
                retry_after_s=outcome.retry_after_s,
            )
        if isinstance(outcome, SetAside) and outcome.asked and not self.unusable():
            reason, detail = outcome.reason, outcome.detail
            return Failed(group_id=group_id, reason=reason, detail=detail, final=True)
        return None

    def unusable(self) -> bool:
        """Note a group refused for good. Returns: True when no probe is needed to believe it."""
        self._unusable += 1
        if self._unusable == UNUSABLE_IN_A_ROW:
            self._open = True  # it may refuse every group, and perhaps no other comes to show it
        return self._unusable <= UNUSABLE_IN_A_ROW and not self.outage.lasts

    def works(self, now: float) -> Cleared:
        """Note that the judge scored a group, for the first time or again.

        Earlier rate limits then count against no group: limits come and go with time.
        """
        own_faults = tuple({**self._unproven, **self._held}.values())
        if len(self._met_alone) + len(self._limited) > MOST_LIMITED:
            self._met_alone.clear()
        self._met_alone.update(self._limited)
        outage_s = self.outage.answered(now)
        self._settle()
        self._held, self._unproven, self._unusable = {}, {}, 0
        self._in_a_row, self._all_fail = 0, False
        return Cleared(own_faults=own_faults, outage_s=outage_s)

    def answers(self, now: float, *, longest_s: float, again_failed: bool = False) -> Doubted:
        """Note that the judge answered the sum question, and there is no better evidence.

        again_failed: the judge failed on a group that was scored before.
        """
        failed_twice = bool(self._held.keys() & self._unproven.keys())
        doubted = {**self._limited, **self._held}
        self._in_a_row += len(self._held)
        self._unproven.update(self._held)
        several = failed_twice and len(self._unproven) >= SEVERAL
        many = self._in_a_row >= FAILED_IN_A_ROW
        self._all_fail = self._all_fail or again_failed or several or many
        outage_s = None
        if self._all_fail:
            self.outage.unanswered(now, longest_s=longest_s)
            self._unproven = {}
        elif not self._limited:  # the sum may fit under a token limit: only a group ends that wait
            outage_s = self.outage.answered(now)
        self._settle()
        self._held = {}
        unproven = tuple(doubted.values())
        return Doubted(unproven=unproven, all_fail=self._all_fail, outage_s=outage_s)

    def down(self, now: float, *, longest_s: float, retry_after_s: float = 0.0) -> bool:
        """Note that the probe failed: the held failures are the judge's fault; see `release`.

        Returns: True when an outage begins now.
        """
        self._settle()
        return self.outage.unanswered(now, longest_s=longest_s, retry_after_s=retry_after_s)

    def release(self) -> tuple[Failed, ...]:
        """Return the held failures and forget them; they count against no group."""
        released, self._held = tuple(self._held.values()), {}
        return released

    def _settle(self) -> None:
        self._open, self._limited_waits, self._limited = False, 0, {}


def defect_of(group_id: str, error: Exception) -> Failed:
    """Return the failure of a group over which the sidecar's own code failed."""
    detail = storable(f"{type(error).__name__}: {error}")[:ERROR_CHARACTERS]
    return Failed(group_id=group_id, reason=DEFECT, detail=detail)


def wait_s(attempts: int) -> float:
    """Return the seconds that a group waits after this many failed attempts, at least 1."""
    return WAITS.wait_s(attempts)


# The judge's queue in the store: which group is judged next, and the counts of failed attempts.

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
