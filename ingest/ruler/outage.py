"""When to ask again a service that does not answer. Pure: the caller brings the clock."""

from __future__ import annotations

from dataclasses import replace

from sidecar.backoff import Backoff

LAST_DELAY_S = 60.0
DELAYS = Backoff(first_s=1.0, last_s=LAST_DELAY_S)
"""Waits while the outage lasts."""
LONGEST_RETRY_AFTER_S = 300.0
"""A service that asks to be left alone for longer is asked again after this; that costs nothing."""


class Outage:
    """One service's outage, from the first unanswered call to the next answered one."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._delay_s = 0.0
        self.retry_at = 0.0
        """Unix seconds before which asking again is pointless."""

    @property
    def lasts(self) -> bool:
        return self._began_at is not None

    def unanswered(
        self, now: float, *, longest_s: float = LAST_DELAY_S, retry_after_s: float = 0.0
    ) -> bool:
        """Note a call without an answer. Returns: whether an outage began with it.

        The wait grows once per wait, not once per call: calls that were in flight together fail
        together.

        longest_s: the wait grows up to it. retry_after_s: the service asks to be left alone for so
        long; it is, for `LONGEST_RETRY_AFTER_S` at most.
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
        """Note an answered call. Returns: how long the outage lasted that it ended, if one did."""
        if self._began_at is None:
            return None
        lasted_s = now - self._began_at
        self._began_at = None
        self.retry_at = 0.0
        return lasted_s
