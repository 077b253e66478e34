"""Keep one judge to so many calls and tokens a minute.

The limits hold for each process by itself, in every minute, by the times when requests go out.
Tokens are booked by an estimate before a call and corrected by what the provider reports; a minute
has more than the limit where a provider uses more than was estimated. So does one in which a call
is made twice (a judge that takes no schema, or thinks: once for each judge and process); the second
request is counted, and not held up.

A wait is bounded: a judgement that would wait for longer is put off (`JudgeLimitedError`); one that
has paid for a call already waits for its next one. First come, first served.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ingest.errors import JudgeBusyError, JudgeLimitedError, JudgeUnavailableError
from ingest.judge_watch import JudgeSeen
from ingest.judges.spending import Ticket, estimate_call
from ingest.ruler.judge import Judge, JudgeReply, context_tokens_of
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S
from sidecar.backoff import Backoff
from sidecar.settings import Judge as JudgeSettings

# The circuit breaker of one judge that has others behind it. Pure: the caller passes the time.

OPEN_AFTER = 3
"""Failures in a row that open it. One or two may be due to the group: a prompt that crashes the
judge's worker, or that a filter refuses."""
WAITS = Backoff(first_s=5.0, last_s=300.0)
"""How long it stays open. A judge that rejects every question for a wrong key costs nothing."""
LIMITED_FOR_LONG_S = 30.0
"""A rate limit that lasts so long without an answer counts as a failure; a shorter one is waited
for. As long as a call waits for the end of a pause (`ingest.ruler.outage.LONGEST_STAY_S`)."""


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


# How much goes out in a minute, and when more may. Pure: no clock.

MINUTE_S = 60.0


@dataclass(eq=False, slots=True)
class Booking:
    """The units of one request; changed by its `Window` alone."""

    units: float
    out_at: float | None = None
    """When the request went out; None: not yet."""
    counts: bool = field(default=True)
    """Within the minute that its window looks at."""


class Window:
    """So many units in any minute."""

    def __init__(self, per_minute: int) -> None:
        """per_minute: 1 or more."""
        self.per_minute = per_minute
        self._pending: dict[int, Booking] = {}
        self._out: deque[Booking] = deque()
        """In the order in which they went out."""
        self._used = 0.0

    def counted(self, units: float) -> float:
        """Return what a request counts for: one beyond the whole limit goes out alone, since the
        provider alone can say whether it takes it."""
        return min(units, float(self.per_minute))

    def book(self, units: float, now: float) -> Booking:
        """Count a request that is about to go out, also where it does not fit."""
        self._expire(now)
        made = Booking(units=self.counted(units))
        self._pending[id(made)] = made
        self._used += made.units
        return made

    def sent(self, booking: Booking, now: float) -> None:
        """Note that a booked request goes out now."""
        if self._pending.pop(id(booking), None) is not None:
            booking.out_at = now
            self._out.append(booking)

    def correct(self, booking: Booking, units: float, now: float) -> None:
        """Replace what was booked by what was used."""
        self._expire(now)
        if booking.counts:
            found = self.counted(units)
            self._used += found - booking.units
            booking.units = found

    def cancel(self, booking: Booking) -> None:
        """Take a booking back whose request never went out."""
        if self._pending.pop(id(booking), None) is not None:
            booking.counts = False
            self._used -= booking.units

    def held(self, now: float) -> deque[tuple[float, float]]:
        """Return (when it ends to count, units) of what counts now, the first to end first."""
        self._expire(now)
        out = [(one.out_at + MINUTE_S, one.units) for one in self._out if one.out_at is not None]
        return deque([*out, *((now + MINUTE_S, one.units) for one in self._pending.values())])

    def _expire(self, now: float) -> None:
        while self._out and (self._out[0].out_at or 0.0) + MINUTE_S <= now:
            gone = self._out.popleft()
            gone.counts = False
            self._used -= gone.units
        if not self._out and not self._pending:
            self._used = 0.0  # no rounding error stays


def free_in_s(windows: Sequence[Window], needs: Sequence[Sequence[float]], now: float) -> float:
    """Return the seconds until the last of some requests may go out, in their order.

    needs: of each request its units in each of the windows.
    """
    if not windows or not needs:
        return 0.0
    held = [window.held(now) for window in windows]
    used = [sum(units for _, units in one) for one in held]
    at = now
    for need in needs:
        counted = [window.counted(units) for window, units in zip(windows, need, strict=True)]
        for place, window in enumerate(windows):
            while held[place] and used[place] + counted[place] > window.per_minute:
                ends, units = held[place].popleft()
                used[place] -= units
                at = max(at, ends)
        for place, units in enumerate(counted):
            held[place].append((at + MINUTE_S, units))
            used[place] += units
    return at - now


LOOK_AGAIN_S = 1.0
"""How often the first of those that wait looks whether a booking was given back or corrected."""


@dataclass(eq=False, slots=True)
class Going:
    """A call that may go out: its booking in each window, and the tokens that were estimated."""

    bookings: tuple[tuple[Window, Booking], ...]
    tokens: int
    requests: int = 0


_GOING: ContextVar[Going | None] = ContextVar("judge_call_going_out", default=None)


class Limits:
    """What one judge may be asked in a minute. Shared by all in a process that ask it."""

    def __init__(self, settings: JudgeSettings) -> None:
        calls, tokens = settings.requests_per_minute, settings.tokens_per_minute
        self.calls = Window(calls) if calls else None
        self.tokens = Window(tokens) if tokens else None
        self.params = settings.params
        self._windows = [one for one in (self.calls, self.tokens) if one is not None]
        self._waiting: list[list[float]] = []
        """What each of those that wait needs of each window, in their order."""
        self._turn = asyncio.Lock()

    async def admit(self, tokens: int, *, longest_s: float) -> Going:
        """Wait until one call of so many tokens may go out, and book it.

        longest_s: the longest wait that is worth it, as it looks now.
        Raises: JudgeLimitedError, with nothing booked.
        """
        need = self._need(tokens)
        wait_s = free_in_s(self._windows, [*self._waiting, need], monotonic())
        if wait_s > longest_s:
            raise JudgeLimitedError(
                "judge.requests_per_minute or judge.tokens_per_minute is reached for another "
                f"{wait_s:.0f} s",
                until=time.time() + wait_s,
            )
        self._waiting.append(need)
        try:
            async with self._turn:
                while True:
                    wait_s = free_in_s(self._windows, [need], monotonic())
                    if wait_s <= 0.0:
                        return self._book(tokens)
                    await asyncio.sleep(min(wait_s, LOOK_AGAIN_S))
        finally:
            self._waiting = [one for one in self._waiting if one is not need]

    def sent(self) -> None:
        """Note that a request of the call that was admitted in this task goes out now."""
        going = _GOING.get()
        if going is None:
            return
        if going.requests:  # made twice
            going = self._book(going.tokens)
        else:
            going.requests = 1
        now = monotonic()
        for window, booking in going.bookings:
            window.sent(booking, now)

    def used(self, going: Going, tokens: int | None) -> None:
        """Correct what was booked for a call by what it used; None: it never went out."""
        now = monotonic()
        for window, booking in going.bookings:
            if tokens is None and not going.requests:
                window.cancel(booking)
                continue
            window.sent(booking, now)  # a judge that does not say when it sends
            if window is self.tokens:
                window.correct(booking, tokens or 0, now)

    def _need(self, tokens: int) -> list[float]:
        return [float(tokens) if one is self.tokens else 1.0 for one in self._windows]

    def _book(self, tokens: int) -> Going:
        now = monotonic()
        needs = zip(self._windows, self._need(tokens), strict=True)
        bookings = tuple((window, window.book(units, now)) for window, units in needs)
        return Going(bookings=bookings, tokens=tokens)


class LimitedJudge:
    """Asks the judge when its limits allow it."""

    def __init__(
        self,
        judge: Judge,
        limits: Limits,
        ticket: Ticket,
        *,
        longest_s: float,
        longest_begun_s: float,
    ) -> None:
        """longest_s: longest wait of a judgement's first call; longest_begun_s: of a later one."""
        self._judge = judge
        self._limits = limits
        self._ticket = ticket
        self._longest_s = longest_s
        self._longest_begun_s = longest_begun_s

    @property
    def model(self) -> str:
        return self._judge.model

    async def context_tokens(self) -> int | None:
        """See `SizedJudge.context_tokens`."""
        return await context_tokens_of(self._judge)

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """See `Judge.complete`. Raises also: JudgeLimitedError, without a call."""
        if self._limits.calls is None and self._limits.tokens is None:
            return await self._judge.complete(messages, schema)
        longest_s = self._longest_begun_s if self._ticket.begun else self._longest_s
        estimate = estimate_call(messages, schema, self._limits.params, None).tokens
        going = await self._limits.admit(estimate, longest_s=longest_s)
        used: int | None = estimate
        mark = _GOING.set(going)
        try:
            reply = await self._judge.complete(messages, schema)
            if reply.prompt_tokens is not None and reply.completion_tokens is not None:
                used = reply.prompt_tokens + reply.completion_tokens
            return reply
        except JudgeUnavailableError as error:
            used = estimate if error.maybe_paid else None
            raise
        finally:
            _GOING.reset(mark)
            self._limits.used(going, used)
