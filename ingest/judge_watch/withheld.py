"""The time for which the operator's own limits forbid to ask the judge: no outage, no fault."""

from __future__ import annotations

import structlog

from ingest.errors import JudgeSpentError
from ingest.judge_watch.report import JudgeReport

log = structlog.get_logger()


class Withheld:
    """Why and until when one worker's judge is not asked. The caller passes the time."""

    def __init__(self, report: JudgeReport) -> None:
        self._report = report
        self._spent = False
        self.until = 0.0
        """The judge is not asked before, in Unix seconds."""

    def note(self, reason: str, why: str, *, until: float) -> None:
        """Note that the judge is withheld. reason: as `JudgeWithheldError.reason`."""
        self.until = max(self.until, until)
        if reason != JudgeSpentError.reason:
            log.debug("judge_limited", why=why)  # as the operator wants it: every few seconds
            return
        if not self._spent:
            log.warning("judge_spent", why=why, until=until)
        self._spent = True
        self._report.spent(why, until=until)

    def ended(self, now: float) -> bool:
        """Tell, once, that a budget is renewed: what is known of the judge is hours old."""
        if not self._spent or now < self.until:
            return False
        self._spent = False
        self._report.renewed()
        log.warning("judge_budget_renewed")
        return True
