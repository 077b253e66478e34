"""One clock of waiting: when a service may be asked next, and for which reason not before. Pure.

`Waiting` is a frozen state; each method takes the time and returns the state after an event. The
reasons to wait are those of `Reason`; the one that lasts longest decides.

The pace of a provider that refuses requests (429) is learned without a setting. A refusal cuts it
to a little less than the rate of the requests that were taken; requests that are taken raise it
again, slowly at first, so that it stays near the provider's limit most of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ingest.errors import JudgeBusyError, JudgeUnavailableError
from sidecar.backoff import Backoff

Reason = Literal["free", "limit", "pace", "pause", "failing", "withheld"]
"""`limit`: requests a minute, as set. `pace`: learned from refusals. `pause`: the
provider asked for it (`Retry-After`). `failing`: no answer. `withheld`: by the operator's limits,
such as a budget."""

MINUTE_S = 60.0
LAST_DELAY_S = 60.0
"""Longest wait for a service whose outage may end by itself."""
DELAYS = Backoff(first_s=1.0, last_s=LAST_DELAY_S)
"""Waits while a service does not answer."""
LONGEST_RETRY_AFTER_S = 300.0
"""Longest honoured `Retry-After`; a request after it costs nothing."""
LONGEST_STAY_S = 30.0
"""A call waits so long for its judge to be free. A judgement's lease has this to spare for each."""
PASSING = (JudgeUnavailableError.reason, JudgeBusyError.reason)
"""Reasons for an outage of the judge that ends by itself."""

KEPT = 0.95
"""Share of the rate of taken requests that a refusal leaves."""
PROBE = 120.0
"""Taken requests after which the pace has doubled. It grows with their fourth power: a limit that a
refusal has just shown is met again after 57 requests, so refusals stay below 2% of all; a limit
four times as high as the last cut left it is reached after 158."""
MEASURED = 16
"""Newest taken requests whose rate is measured: few enough that a burst that a provider allows at
first is soon forgotten."""
LONG_S = 10.0
"""A refusal that lasts so long is a limit of a minute or more that is used up."""
SLOWEST = 0.5
"""Requests a second below which no refusal cuts the pace. Refusals that have nothing to do with
the pace would cut it for ever; a provider that is slower than this is met by `AGAIN`."""
AGAIN = 0.25
"""Share of the time since the first of some refusals in a row after which it is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that counts in the minute after it went out."""

    number: int
    at: float = math.inf
    """Inf: it is about to go out."""
    taken: bool = False
    """It was answered, other than by a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is known of one service. Times are in seconds of the caller's clock."""

    requests: tuple[Request, ...] = ()
    """Those of the last minute."""
    asked: int = 0
    """All requests so far: the number of the last one."""
    pace: float = math.inf
    """Requests a second, as the last cut left it."""
    cut_at: float = -math.inf
    taken: int = 0
    """Requests that were taken since the last cut."""
    limited_since: float | None = None
    """When the first request was refused since one was taken."""
    next_at: float = 0.0
    paused_until: float = 0.0
    failures: int = 0
    """Failures since the last answer."""
    failing_since: float | None = None
    delay_s: float = 0.0
    retry_at: float = 0.0
    withheld_until: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second that may go out now."""
        return self.pace * (1.0 + (self.taken / PROBE) ** 4)

    @property
    def lasts(self) -> bool:
        """An outage lasts: nothing was answered since a failure."""
        return self.failing_since is not None

    def free_at(
        self, now: float, per_minute: int = 0, *, trying: bool = False
    ) -> tuple[float, Reason]:
        """Return when a request may go out, `now` at the earliest, and why.

        per_minute: requests that may go out in any minute; 0: no limit.
        trying: also while it is failing: the caller decided to try it.
        """
        reasons: list[tuple[float, Reason]] = [
            (now, "free"),
            (self._fits_at(now, per_minute), "limit"),
            (self.next_at, "pace"),
            (self.paused_until, "pause"),
            (0.0 if trying else self.retry_at, "failing"),
            (self.withheld_until, "withheld"),
        ]
        return max(reasons, key=lambda reason: reason[0])

    def free_after(self, ahead: int, now: float, per_minute: int) -> tuple[float, Reason]:
        """Return when one more request may go out after so many others."""
        state = self
        found: tuple[float, Reason] = (now, "free")
        for _ in range(ahead + 1):
            found = state.free_at(found[0], per_minute, trying=True)
            state = state.booked(found[0]).sent(state.asked + 1, found[0])
        return found

    def booked(self, now: float) -> Waiting:
        """A request is about to go out; its number is `asked`."""
        number = self.asked + 1
        rate = self.rate
        return replace(
            self,
            asked=number,
            requests=(*self._recent(now), Request(number=number)),
            next_at=max(self.next_at, now) + 1.0 / rate if math.isfinite(rate) else self.next_at,
        )

    def sent(self, number: int, now: float) -> Waiting:
        return self._changed(number, at=now)

    def ended(self, number: int) -> Waiting:
        """A request ended; one that never went out does not count any more."""
        kept = tuple(one for one in self.requests if one.number != number or one.at < math.inf)
        return replace(self, requests=kept)

    def accepted(self, number: int) -> Waiting:
        """A request was answered, other than by a refusal for its rate."""
        state = self._changed(number, taken=True)
        return replace(state, taken=self.taken + 1, limited_since=None)

    def limited(self, number: int, now: float, retry_after_s: float = 0.0) -> Waiting:
        """A request was refused for its rate. retry_after_s: the pause that was asked for."""
        sent_at = next((one.at for one in self.requests if one.number == number), now)
        since = now if self.limited_since is None else self.limited_since
        state = replace(
            self.paused(now + min(retry_after_s, LONGEST_RETRY_AFTER_S)), limited_since=since
        )
        if sent_at <= self.cut_at:  # of those in flight together the first one tells
            return state
        rate = self.rate
        if math.isinf(rate):
            rate = float(sum(abs(one.at - sent_at) < 1.0 for one in self.requests)) or 1.0
        waits_s, left = max(retry_after_s, now - since), rate
        if self.taken < MEASURED or waits_s >= LONG_S:
            minute_ends_at = now + retry_after_s if waits_s >= LONG_S else None
            left = max(self._measured(minute_ends_at), rate / 2)
        pace = max(SLOWEST, min(rate, KEPT * left))
        wait_s = min(max(1.0 / pace, AGAIN * (now - since)), LAST_DELAY_S)
        return replace(state, pace=pace, cut_at=now, taken=0, next_at=now + wait_s)

    def paused(self, until: float) -> Waiting:
        return replace(self, paused_until=max(self.paused_until, until))

    def failed(
        self,
        now: float,
        *,
        longest_s: float = LAST_DELAY_S,
        retry_after_s: float = 0.0,
        opens_after: int = 1,
        opens: bool = False,
    ) -> Waiting:
        """Nothing was answered. The wait doubles once per wait, not once per call: calls in flight
        together fail together.

        longest_s: upper limit of the wait. opens_after: failures in a row that make an outage.
        opens: this one makes it.
        """
        state = replace(
            self,
            failures=self.failures + (opens_after if opens else 1),
            failing_since=now if self.failing_since is None else self.failing_since,
        )
        if state.failures < opens_after:
            return state
        if not self.delay_s or now >= self.retry_at:
            delay_s = replace(DELAYS, last_s=longest_s).after_s(self.delay_s)
            state = replace(state, delay_s=delay_s, retry_at=now + delay_s)
        asked_for = now + min(retry_after_s, LONGEST_RETRY_AFTER_S)
        return replace(state, retry_at=max(state.retry_at, asked_for))

    def answered(self) -> Waiting:
        """It works: an outage is over."""
        return replace(self, failures=0, failing_since=None, delay_s=0.0, retry_at=0.0)

    def withheld(self, until: float) -> Waiting:
        return replace(self, withheld_until=max(self.withheld_until, until))

    def _recent(self, now: float) -> tuple[Request, ...]:
        return tuple(one for one in self.requests if one.at + MINUTE_S > now)

    def _changed(self, number: int, **fields: float | bool) -> Waiting:
        found = tuple(
            replace(one, **fields) if one.number == number else one  # type: ignore[arg-type]
            for one in self.requests
        )
        return replace(self, requests=found)

    def _fits_at(self, now: float, per_minute: int) -> float:
        """Return when one more request is within the limit of a minute; 0: there is none."""
        # One that is about to go out counts until a minute after that, so at least a minute more.
        ends = sorted(min(one.at, now) + MINUTE_S for one in self._recent(now))
        over = len(ends) - per_minute
        return ends[over] if per_minute and over >= 0 else now

    def _measured(self, minute_ends_at: float | None) -> float:
        """Return the rate of the newest requests that were taken; where the limit of a minute is
        used up, of all that it took, when that is lower. 0: too few to tell."""
        times = sorted(one.at for one in self.requests if one.taken)
        newest = times[-MEASURED:]
        if len(newest) < 4:
            return 0.0
        spent_s = newest[-1] - newest[0]
        lately = (len(newest) - 1) / spent_s if spent_s else math.inf
        if minute_ends_at is None:
            return lately
        return min(lately, len(times) / (minute_ends_at - times[0]))
