"""Back-off for a service that does not answer. Pure: the caller passes the time."""

from __future__ import annotations

from dataclasses import replace

from ingest.errors import JudgeBusyError, JudgeUnavailableError
from sidecar.backoff import Backoff

LAST_DELAY_S = 60.0
PASSING = (JudgeUnavailableError.reason, JudgeBusyError.reason)
"""Reasons for an outage of the judge that ends by itself."""
DELAYS = Backoff(first_s=1.0, last_s=LAST_DELAY_S)
"""Waits while the outage lasts."""
LONGEST_RETRY_AFTER_S = 300.0
"""Longest honoured `Retry-After`; a request after it costs nothing."""


class Outage:
    """One service's outage, from the first unanswered call to the next answered one."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._delay_s = 0.0
        self.retry_at = 0.0
        """Time of the next attempt, in Unix seconds."""

    @property
    def lasts(self) -> bool:
        return self._began_at is not None

    @property
    def end(self) -> float | None:
        """When it may end, in Unix seconds; None: it does not last."""
        return self.retry_at if self.lasts else None

    def unanswered(
        self, now: float, *, longest_s: float = LAST_DELAY_S, retry_after_s: float = 0.0
    ) -> bool:
        """Note a call without an answer. Returns: True when an outage begins now.

        The wait doubles once per wait, not once per call: calls in flight together fail together.

        longest_s: upper limit of the wait. retry_after_s: pause that the service asked for,
            honoured up to `LONGEST_RETRY_AFTER_S`.
        """
        began = self._began_at is None
        if self._began_at is None:
            self._began_at = now
            self._delay_s = DELAYS.first_s
            self.retry_at = now + self._delay_s
        elif now >= self.retry_at:
            self._delay_s = replace(DELAYS, last_s=longest_s).after_s(self._delay_s)
            self.retry_at = now + self._delay_s
        self.retry_at = max(self.retry_at, now + min(retry_after_s, LONGEST_RETRY_AFTER_S))
        return began

    def answered(self, now: float) -> float | None:
        """Note an answered call. Returns: seconds of the outage that it ended; None without one."""
        if self._began_at is None:
            return None
        lasted_s = now - self._began_at
        self._began_at = None
        self.retry_at = 0.0
        return lasted_s
