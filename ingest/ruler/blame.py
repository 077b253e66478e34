"""Whose fault is a failed judge call: the group's or the judge's? Pure: the caller has the clock.

An error does not tell. A content filter answers 403 to one group, a wrong key answers 403 to all; a
prompt that crashes the judge's worker looks like an outage. So a group that failed is held until
there is evidence, of three kinds:

- A real group is scored afterwards: the failure was the held group's own and counts as an attempt.
  When nothing else is in flight, the caller asks again about a group that was scored before.
- The judge fails over that group and over a sum too: an outage. Nothing counts.
- The judge answers the sum only. That proves nothing of real groups: each failure counts as
  unproven, of which a group may have many, over days. When several groups fail in a row so, the
  judge fails over all real groups: that is treated as an outage.

In an outage one group is asked at a time, after longer and longer waits. So an outage costs at most
the calls that were in flight when it began, `FAILED_IN_A_ROW` where the judge still answers the
sum, and one for each wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S, Outage
from sidecar.backoff import Backoff

DEFECT = "judge_defect"
"""The sidecar's own code failed over the group."""
INTERRUPTED = "judge_interrupted"
"""The process died while the group was being judged."""
UNPROVEN = "unproven"
"""The judge failed over the group and answered a sum; whether it can judge any group, is open."""
ATTEMPTS = {
    JudgeRejectedError.reason: 3,
    JudgeGarbledError.reason: 3,
    DEFECT: 3,
    INTERRUPTED: 5,
    JudgeUnavailableError.reason: 10,
    JudgeBusyError.reason: 30,
    UNPROVEN: 100,
}
"""After so many failed attempts for one reason a group is set aside; each reason is counted by
itself. The less an error says of the group, the more attempts: where half of all calls fail by
chance, one good group in 1,000 fails ten in a row."""
WAITS = Backoff(first_s=5.0, last_s=3600.0)
"""A group's wait after its first attempt; it doubles with each. Ten attempts take 43 minutes,
thirty take 21 hours, a hundred take 91 hours: longer than a weekend."""
LIMITED_WAITS = 5
"""After so many waits for a limit the probe tells whether a group is too large for the limit."""
MOST_LIMITED = 1_000
FAILED_IN_A_ROW = 24
"""After so many failures in a row, none of them a group's proven fault, the judge fails over all
groups. Fewer would let a few bad groups at the front of the queue slow down all others."""
SEVERAL = 3
"""So many different groups are enough once one of them has failed twice: groups that never failed
go first, so none of those is left."""
UNUSABLE_IN_A_ROW = 3
"""So many groups in a row may be refused for good (too long, rubbish twice) on the judge's word.
Then the probe has to show that the judge does not refuse everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A group whose judging failed, held until it is known whose fault that was."""

    group_id: str
    reason: str
    detail: str
    final: bool = False
    """Set aside as soon as it is known to be the group's own fault."""
    retry_after_s: float = 0.0
    """The judge asked for so long a pause before the next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """The judge works."""

    own_faults: tuple[Failed, ...]
    outage_s: float | None
    """How long the outage lasted that ended with it, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """The judge answers a sum; it is open whether it judges real groups."""

    unproven: tuple[Failed, ...]
    all_fail: bool
    """So many groups have failed that it is taken not to: an outage lasts."""
    outage_s: float | None
    """As `Cleared.outage_s`."""


class Blame:
    """What is known of one judge, from the calls of one worker."""

    def __init__(self) -> None:
        self.outage = Outage()
        self._held: dict[str, Failed] = {}
        self._unproven: dict[str, Failed] = {}
        """Groups that failed since one was last scored, while the judge answered the sum."""
        self._in_a_row = 0
        self._all_fail = False
        self._limited: dict[str, Failed] = {}
        """Groups that met a limit of requests or tokens, by id. They are not held."""
        self._met_alone: set[str] = set()
        """Groups that met a limit while others, afterwards, did not."""
        self._limited_waits = 0
        self._open = False
        self._unusable = 0
        self._quiet_until = 0.0

    def room(self, most: int, now: float) -> int:
        """Groups that may be in flight now: all, one to try the judge again, or none."""
        if self._open or now < self._quiet_until:
            return 0
        if not self.outage.lasts:
            return most
        return 1 if now >= self.outage.retry_at else 0

    def wants_probe(self, now: float) -> bool:
        """Whether to send the probe, provided that no other call is in flight that may tell."""
        return self._open and now >= max(self.outage.retry_at, self._quiet_until)

    def failed(self, failed: Failed, now: float) -> bool:
        """Note a group without a usable answer. Returns: whether a pause for all began with it."""
        # A group pauses the others once: at its next limit the probe tells whether it is its own.
        if failed.reason != JudgeBusyError.reason or failed.group_id in self._met_alone:
            self._held[failed.group_id] = failed
            self._open = True
            return False
        # The probe would use up what the limit leaves: it is sent only after many waits.
        self._limited_waits += now >= self.outage.retry_at
        self._open = self._open or self._limited_waits > LIMITED_WAITS
        if len(self._limited) < MOST_LIMITED:
            self._limited[failed.group_id] = failed
        # Also when others are still answered: whoever counts our requests has asked for it.
        quiet_s = min(failed.retry_after_s, LONGEST_RETRY_AFTER_S)
        self._quiet_until = max(self._quiet_until, now + quiet_s)
        return self.outage.unanswered(now, retry_after_s=failed.retry_after_s)

    def holds(self, group_id: str) -> bool:
        return group_id in self._held

    def unusable(self) -> bool:
        """Note a group refused for good. Returns: whether that may be believed without a probe."""
        self._unusable += 1
        self._open = self._open or self.outage.lasts
        return self._unusable <= UNUSABLE_IN_A_ROW

    def works(self, now: float) -> Cleared:
        """Note that the judge scored a group, for the first time or again.

        A limit that a group met before it is nobody's fault: limits come and go with time.
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
        """Note that the judge answered the sum, and nothing better is known of it.

        again_failed: it failed over a group that was scored before.
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
        elif not self._limited:  # the sum may pass below a limit of tokens: a group ends that wait
            outage_s = self.outage.answered(now)
        self._settle()
        self._held = {}
        unproven = tuple(doubted.values())
        return Doubted(unproven=unproven, all_fail=self._all_fail, outage_s=outage_s)

    def down(self, now: float, *, longest_s: float, retry_after_s: float = 0.0) -> bool:
        """Note that the probe failed: what is held is not the groups' fault; see `release`.

        Returns: whether an outage began with it.
        """
        self._settle()
        return self.outage.unanswered(now, longest_s=longest_s, retry_after_s=retry_after_s)

    def release(self) -> tuple[Failed, ...]:
        """Let go of what is held, without blame."""
        released, self._held = tuple(self._held.values()), {}
        return released

    def _settle(self) -> None:
        self._open, self._limited_waits, self._limited = False, 0, {}


def wait_s(attempts: int) -> float:
    """How long a group waits after so many attempts, at least one."""
    return WAITS.wait_s(attempts)
