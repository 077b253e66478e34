"""Decide who caused a failed judge call: the group or the judge? Pure: the caller has the clock.

The error itself does not tell. A content filter answers 403 to one group, a wrong key answers 403
to all; a prompt that crashes the judge's worker looks like an outage. So a group that failed is
held until there is evidence, of three kinds:

- A real group is scored afterwards: the failure was the held group's own and counts as an attempt.
  When nothing else is in flight, the caller judges a group again that was scored before.
- The judge fails on that group and on the sum question (`ingest.ruler.group`) too: an outage.
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
from ingest.ruler.group import RUBBISH, GroupOutcome, SetAside, Unanswered
from ingest.ruler.judge import ERROR_CHARACTERS, storable
from ingest.ruler.waiting import DELAYS, LONGEST_RETRY_AFTER_S, Waiting
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
    RUBBISH: 5,
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
MOST_LIMITED = 1_000
"""Groups that met a rate limit and are remembered."""
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
"""Consecutive groups that the judge may refuse (too long, unusable reply twice) without a check.
Then a probe must show that the judge does not refuse everything; it is sent at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A group whose judging failed, held until the cause is known."""

    group_id: str
    reason: str
    detail: str
    final: bool = False
    """True: set aside without further attempts once the failure is proven the group's own."""
    believed: bool = False
    """True: the failure is the group's own, without a proof."""
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
        self.waiting = Waiting()
        self._held: dict[str, Failed] = {}
        self._unproven: dict[str, Failed] = {}
        """Groups that failed since the last scored one, though the sum question was answered."""
        self._in_a_row = 0
        self._all_fail = False
        self._limited: set[str] = set()
        """Groups that met a rate limit since the last scored one. They are not held."""
        self._met_alone: set[str] = set()
        """Groups that met a rate limit while later ones did not."""
        self._open = False
        self._unusable = 0

    @property
    def free_at(self) -> float:
        """When the judge may be asked, in Unix seconds; past: now."""
        return self.waiting.free_at(0.0)[0]

    def begin(self) -> None:
        """Ask for a probe before the first group: nothing is known of the judge."""
        self._open = True

    def room(self, most: int, now: float) -> int:
        """Return how many groups may be in flight: `most`, one to test the judge again, or none."""
        if self._open or now < self.free_at:
            return 0
        return 1 if self.waiting.lasts else most

    def wants_probe(self, now: float) -> bool:
        """Return True when a probe is due, provided that no other call is in flight."""
        if not self._open and (self._all_fail or not self.waiting.lasts):
            return False  # a judge that is good for a sum only is not asked for sums
        return now >= (self.free_at if self._open else self.free_at + IDLE_S)

    def failed(self, failed: Failed, now: float) -> bool:
        """Note a group without a usable answer. Returns: True when a pause for all begins now."""
        # A group pauses the others once: at its next limit a probe tells whether it is too large.
        if failed.reason != JudgeBusyError.reason or failed.group_id in self._met_alone:
            self._held[failed.group_id] = failed
            self._open = True
            return False
        began = self.waiting.paused_until <= now
        pause_s = min(max(failed.retry_after_s, DELAYS.first_s), LONGEST_RETRY_AFTER_S)
        self.waiting = self.waiting.paused(now + pause_s)
        self._limited.add(failed.group_id)
        return began

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
        if not isinstance(outcome, SetAside) or not outcome.asked:
            return None
        believed, final = self.unusable(), outcome.reason != RUBBISH
        if believed and final:
            return None
        return Failed(
            group_id=group_id,
            reason=outcome.reason,
            detail=outcome.detail,
            final=final,
            believed=believed,
        )

    def unusable(self) -> bool:
        """Note a group without a usable reply. Returns: True when no probe is needed to believe
        it."""
        self._unusable += 1
        if self._unusable == UNUSABLE_IN_A_ROW:
            self._open = True  # it may refuse every group, and perhaps no other comes to show it
        return self._unusable <= UNUSABLE_IN_A_ROW and not self.waiting.lasts

    def works(self, now: float) -> Cleared:
        """Note that the judge scored a group, for the first time or again.

        Earlier rate limits then count against no group: limits come and go with time.
        """
        own_faults = tuple({**self._unproven, **self._held}.values())
        if len(self._met_alone) + len(self._limited) > MOST_LIMITED:
            self._met_alone.clear()
        self._met_alone |= self._limited
        self._held, self._unproven, self._unusable = {}, {}, 0
        self._in_a_row, self._all_fail, self._open, self._limited = 0, False, False, set()
        return Cleared(own_faults=own_faults, outage_s=self._ends(now))

    def answers(self, now: float, *, longest_s: float, again_failed: bool = False) -> Doubted:
        """Note that the judge answered the sum question, and there is no better evidence.

        again_failed: the judge failed on a group that was scored before.
        """
        failed_twice = bool(self._held.keys() & self._unproven.keys())
        unproven = self.release()
        self._in_a_row += len(unproven)
        self._unproven.update({one.group_id: one for one in unproven})
        several = failed_twice and len(self._unproven) >= SEVERAL
        many = self._in_a_row >= FAILED_IN_A_ROW
        self._all_fail = self._all_fail or again_failed or several or many
        outage_s = None
        if self._all_fail:
            self.down(now, longest_s=longest_s)
            self._unproven = {}
        else:
            self._open, outage_s = False, self._ends(now)
        return Doubted(unproven=unproven, all_fail=self._all_fail, outage_s=outage_s)

    def down(self, now: float, *, longest_s: float, retry_after_s: float = 0.0) -> None:
        """Note that the probe failed: the held failures are the judge's fault; see `release`."""
        self._open = False
        self.waiting = self.waiting.failed(now, longest_s=longest_s, retry_after_s=retry_after_s)

    def release(self) -> tuple[Failed, ...]:
        """Return the held failures and forget them; they count against no group."""
        released, self._held = tuple(self._held.values()), {}
        return released

    def _ends(self, now: float) -> float | None:
        """The judge answers. Returns: seconds of the outage that this ends; None: no outage."""
        since, self.waiting = self.waiting.failing_since, self.waiting.answered()
        return None if since is None else now - since


def defect_of(group_id: str, error: Exception) -> Failed:
    """Return the failure of a group over which the sidecar's own code failed."""
    detail = storable(f"{type(error).__name__}: {error}")[:ERROR_CHARACTERS]
    return Failed(group_id=group_id, reason=DEFECT, detail=detail)


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


def charge(session: Session, failed: Failed, *, now: float, proven: bool = True) -> bool:
    """Count a failed attempt; after too many, set the group aside, else queue it for its next.

    proven: it is the group's own fault; else its cause is not known. A 200 that is no answer is its
        provider's fault (`JudgeGarbledError`), so it is never proven.
    Returns: True when the group was set aside now.
    """
    row = session.scalar(
        select(GroupRow)
        .where(GroupRow.group_id == failed.group_id, GroupRow.status == SAMPLED)
        .with_for_update()  # its counts are read, then written
    )
    if row is None:
        return False
    proven = proven and failed.reason != JudgeGarbledError.reason
    row.judge_attempts += proven
    ended = _count_failure(row, failed.reason if proven else UNPROVEN) or (proven and failed.final)
    wait_s = WAITS.wait_s(max(row.judge_attempts, failures(row).get(UNPROVEN, 0)))
    row.detail = failed.detail
    row.judging_since = None
    row.lease_until = now + max(wait_s, min(failed.retry_after_s, LONGEST_RETRY_AFTER_S))
    session.flush()
    return ended and set_aside(session, row.group_id, failed.reason, detail=failed.detail)


def failures(row: GroupRow) -> dict[str, int]:
    """Return the group's failed attempts by reason. Unreadable entries are left out."""
    try:
        return msgspec.json.decode(row.judge_failures or "{}", type=dict[str, int])
    except (msgspec.MsgspecError, UnicodeError):
        return {}


def _count_failure(row: GroupRow, reason: str) -> bool:
    """Count one failure. Returns: True when the group has failed too often for this reason."""
    counts = failures(row)
    counts[reason] = counts.get(reason, 0) + 1
    row.judge_failures = msgspec.json.encode(counts).decode()
    return counts[reason] >= ATTEMPTS[reason]


def _first_to_try_again(session: Session, left: Sequence[GroupRow]) -> GroupRow | None:
    """Return the first group, of those that a process died over, that may be tried again.

    The death counts as one more failure of it. Groups before it that have failed too often are set
    aside.
    """
    for row in left:
        row.judge_attempts = row.judge_attempts + 1
        if not _count_failure(row, INTERRUPTED):
            return row
        session.flush()
        set_aside(session, row.group_id, INTERRUPTED, detail=INTERRUPTED_DETAIL)
    return None
