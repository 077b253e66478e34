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
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ingest.errors import JudgeLimitedError, JudgeUnavailableError
from ingest.judges.meter import Ticket, estimate_call
from ingest.judges.window import Booking, Window, free_in_s
from ingest.ruler.judge import Judge, JudgeReply, context_tokens_of
from sidecar.settings import Judge as JudgeSettings

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
