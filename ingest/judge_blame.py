"""Whose fault is a failed judge call: the group's or the judge's? Pure: the caller has the clock.

An error does not tell. A content filter answers 403 to one group, a wrong key answers 403 to all; a
prompt that crashes the judge's worker looks like an outage. So a group that failed is held until
there is evidence. A group that was scored afterwards, or a probe that was, proves that the judge
works: the failure was the group's own and counts as an attempt. A probe that fails as well proves
an outage: nothing counts, and the judge is asked again after longer and longer waits.

While that is open no further group is asked. So an outage costs at most the calls that were in
flight when it began and one for each wait, and it costs no group an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.outage import LONGEST_RETRY_AFTER_S, Outage

DEFECT = "judge_defect"
"""The sidecar's own code failed over the group."""
INTERRUPTED = "judge_interrupted"
"""The process died while the group was being judged."""
ATTEMPTS = {
    JudgeRejectedError.reason: 3,
    JudgeGarbledError.reason: 3,
    DEFECT: 3,
    INTERRUPTED: 5,
    JudgeUnavailableError.reason: 10,
    JudgeBusyError.reason: 30,
}
"""After so many failed attempts a group is set aside. The less an error says of the group, the more
attempts: where half of all calls fail by chance, one good group in 1,000 fails ten in a row."""
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 3600.0
"""A group's wait after its first attempt; it doubles with each. Ten attempts take 43 minutes,
thirty take 21 hours."""
LIMITED_WAITS = 5
"""After so many waits for a limit the probe tells whether a group is too large for the limit."""
MOST_LIMITED = 1_000
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """The judge works."""

    own_faults: tuple[Failed, ...]
    outage_s: float | None
    """How long the outage lasted that ended with it, if one did."""


class Blame:
    """What is known of one judge, from the calls of one worker."""

    def __init__(self) -> None:
        self.outage = Outage()
        self._held: list[Failed] = []
        self._limited: dict[str, Failed] = {}
        """Groups that met a limit of requests or tokens, by id. They are not held."""
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

    def failed(self, failed: Failed, now: float, *, retry_after_s: float = 0.0) -> bool:
        """Note a group without a usable answer. Returns: whether a pause for all began with it."""
        if failed.reason != JudgeBusyError.reason:
            self._held.append(failed)
            self._open = True
            return False
        # The probe would use up what the limit leaves: it is sent only after many waits.
        self._limited_waits += now >= self.outage.retry_at
        self._open = self._open or self._limited_waits > LIMITED_WAITS
        if len(self._limited) < MOST_LIMITED:
            self._limited[failed.group_id] = failed
        # Also when others are still answered: whoever counts our requests has asked for it.
        quiet_s = min(retry_after_s, LONGEST_RETRY_AFTER_S)
        self._quiet_until = max(self._quiet_until, now + quiet_s)
        return self.outage.unanswered(now, retry_after_s=retry_after_s)

    def unusable(self) -> bool:
        """Note a group refused for good. Returns: whether that may be believed without a probe."""
        self._unusable += 1
        self._open = self._open or self.outage.lasts
        return self._unusable <= UNUSABLE_IN_A_ROW

    def works(self, now: float, *, by_probe: bool = False) -> Cleared:
        """Note that the judge scored a group, or the probe."""
        own_faults = (*self._held, *self._limited.values())
        # The probe may pass below a limit of tokens: then only a group ends the wait.
        outage_s = None if by_probe and self._limited else self.outage.answered(now)
        self._settle()
        self._held, self._unusable = [], 0
        return Cleared(own_faults=own_faults, outage_s=outage_s)

    def down(self, now: float, *, longest_s: float, retry_after_s: float = 0.0) -> bool:
        """Note that the probe failed: what is held is not the groups' fault; see `release`.

        Returns: whether an outage began with it.
        """
        self._settle()
        return self.outage.unanswered(now, longest_s=longest_s, retry_after_s=retry_after_s)

    def release(self) -> tuple[Failed, ...]:
        """Let go of what is held, without blame."""
        released, self._held = tuple(self._held), []
        return released

    def _settle(self) -> None:
        self._open, self._limited_waits, self._limited = False, 0, {}


def wait_s(attempts: int) -> float:
    """How long a group waits after so many attempts, at least one."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempts - 1, 30)))
