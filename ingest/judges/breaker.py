"""The circuit breaker of one judge that has others behind it. Pure: the caller passes the time.

Closed: it is asked. After a few failures in a row it opens, and the judge is left alone; after a
wait that doubles, one judgement tries it (half-open), and closes the breaker or opens it again.
"""

from __future__ import annotations

from ingest.errors import JudgeBusyError, JudgeUnavailableError
from ingest.judge_watch.state import JudgeSeen
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S
from sidecar.backoff import Backoff

OPEN_AFTER = 3
"""Failures in a row that open it. One or two may be due to the group: a prompt that crashes the
judge's worker, or that a filter refuses."""
WAITS = Backoff(first_s=5.0, last_s=300.0)
"""How long it stays open. A judge that rejects every question for a wrong key costs nothing."""
LIMITED_FOR_LONG_S = 30.0
"""A rate limit that lasts so long without an answer counts as a failure; a shorter one is waited
for. As long as a call waits for the end of a pause (`ingest.ruler.pause.LONGEST_STAY_S`)."""


class Breaker:
    """What is known of one judge."""

    def __init__(self) -> None:
        self._failures = 0
        self._wait_s = 0.0
        self._retry_at: float | None = None
        """When it may be tried again; None: closed."""
        self._trying = False
        self._since: float | None = None
        self._limited_since: float | None = None
        self._reason = self._error = ""
        self._without: tuple[str, ...] = ()

    @property
    def is_closed(self) -> bool:
        return self._retry_at is None

    def admits(self, now: float) -> bool:
        """Tell whether a judgement may ask this judge."""
        return self._retry_at is None or (now >= self._retry_at and not self._trying)

    def begin(self, now: float) -> bool:
        """Note that a judgement asks it. Returns: True when this one tries an open breaker."""
        tries = not self.is_closed and self.admits(now)
        self._trying = self._trying or tries
        return tries

    def end(self, *, tried: bool) -> None:
        """Note that a judgement is over, however it ended. tried: what `begin` returned."""
        self._trying = self._trying and not tried

    def answered(self) -> None:
        """Note that the judge answered: it is closed."""
        self._failures, self._wait_s, self._retry_at = 0, 0.0, None
        self._since = self._limited_since = None

    def failed(
        self, now: float, error: str, *, tried: bool, reason: str = JudgeUnavailableError.reason
    ) -> None:
        """Note a judgement without an answer. reason: its kind, without the provider's words."""
        self._reason, self._error = reason, error
        self._since = now if self._since is None else self._since
        self._failures += 1
        if tried or (self.is_closed and self._failures >= OPEN_AFTER):
            self._open(now, 0.0)

    def limited(self, now: float, error: str, *, tried: bool, retry_after_s: float) -> None:
        """Note a rate limit. retry_after_s: the pause that the provider asked for; 0: none."""
        self._reason, self._error = JudgeBusyError.reason, error
        self._since = now if self._since is None else self._since
        self._limited_since = now if self._limited_since is None else self._limited_since
        longest_s = max(retry_after_s, now - self._limited_since)
        if tried or (self.is_closed and longest_s >= LIMITED_FOR_LONG_S):
            self._open(now, retry_after_s)

    def seen(self, model: str) -> JudgeSeen:
        """Return what is known, for people."""
        return JudgeSeen(
            model=model,
            breaker="closed" if self.is_closed else "half_open" if self._trying else "open",
            since=self._since,
            until=self._retry_at,
            reason=self._reason,
            error=self._error,
            without=self._without,
        )

    def takes_no(self, without: tuple[str, ...]) -> None:
        """Note which parts of requests the judge does not take."""
        self._without = without

    def _open(self, now: float, retry_after_s: float) -> None:
        self._wait_s = WAITS.after_s(self._wait_s)
        self._retry_at = now + max(self._wait_s, min(retry_after_s, LONGEST_RETRY_AFTER_S))
