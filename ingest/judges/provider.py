"""Ask one judge when it is free, and the next one when it is away.

Each judge of a process has one clock of waiting (`ingest.ruler.waiting`), shared by all that ask
it: scoring, the gate, best of N. A call waits until the clock is free and is made again after a
refusal for its rate, as long as its caller has patience; first come, first served. The limits of
`judge.requests_per_minute` hold for each process by itself. A call that turns out to need a second
request (a judge that takes no schema, or thinks: once for each judge and process) books it, and
does not hold it up.

A judgement is made by one judge from its first pass to its last, since the scores of two do not
compare. When a judge gives no answer, the whole judgement is made again by the next; its calls so
far are paid for and recorded, and none of its scores is used. So while the first judge is away no
group waits, none counts as failed, and none has scores of two judges.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import structlog

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeLimitedError,
    JudgeNoCreditError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeReplyError,
    JudgeTooLongError,
    JudgeUnavailableError,
    JudgeWithheldError,
)
from ingest.judge_watch import JudgeSeen
from ingest.judges.replies import CachedJudge, KeptReplies
from ingest.judges.spending import Ledger, Meter
from ingest.ruler.judge import Found, Judge, JudgeReply, LiteLlmJudge, context_tokens_of
from ingest.ruler.waiting import LONGEST_STAY_S, Reason, Waiting
from sidecar.settings import Judge as JudgeSettings

PERMANENT = (JudgeRejectedError, JudgeGarbledError)
"""Failures that an operator has to end."""
OPENS_AFTER = 3
"""Failures in a row after which the next judge is asked first. One or two may be due to the group:
a prompt that crashes the judge's worker, or that a filter refuses."""
LONGEST_FAILING_S = 300.0
"""Longest wait for a judge that has another behind it."""
LOOK_AGAIN_S = 1.0
"""How often the first of the calls that wait looks at the clock again: bookings are corrected."""
SHORTEST_S = 0.02
"""How soon it looks again while a call that was refused goes first."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a call waits for its judge to be free, in seconds."""

    first_s: float
    """The first call of a judgement."""
    begun_s: float
    """A later one: what was paid for is finished."""


class Provider:
    """One judge, and what all in the process that ask it share."""

    def __init__(
        self,
        judge: Judge,
        settings: JudgeSettings,
        meter: Meter,
        *,
        kept: KeptReplies | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """settings: those of this judge; a fallback has a model and a price of its own."""
        self.judge = judge
        self.settings = settings
        self.meter = meter
        self.kept = kept
        self.clock = clock
        self.waiting = Waiting()
        self._per_minute = settings.requests_per_minute
        self._queued = 0
        """Calls that wait."""
        self._refused = 0
        """Those of them that were made before and refused: they go first."""
        self._turn = asyncio.Lock()
        self._tried = False
        """A judgement tries it after its failures."""
        self._reason = self._error = ""
        self._without: tuple[str, ...] = ()

    @classmethod
    def open(
        cls,
        settings: JudgeSettings,
        ledger: Ledger,
        kept: KeptReplies | None,
        clock: Callable[[], float],
    ) -> Provider:
        """Make the provider of a judge that LiteLLM can call."""
        meter = Meter(settings, ledger)
        made: Provider = cls(
            LiteLlmJudge(
                settings,
                on_again=lambda: made.again(),
                on_paid=meter.paid,
                on_without=lambda without: made.takes_no(without),
            ),
            settings,
            meter,
            kept=kept,
            clock=clock,
        )
        return made

    @property
    def is_open(self) -> bool:
        """It failed, and is not asked while another can be."""
        return self.waiting.failures >= OPENS_AFTER

    def admits(self) -> bool:
        """Tell whether a judgement may ask this judge rather than the next one."""
        now = self.clock()
        paused_s = self.waiting.paused_until - now
        due = now >= self.waiting.retry_at and not self._tried
        return paused_s < LONGEST_STAY_S and (not self.is_open or due)

    def seen(self) -> JudgeSeen:
        return JudgeSeen(
            model=self.judge.model,
            breaker="closed" if not self.is_open else "half_open" if self._tried else "open",
            since=self.waiting.failing_since or self.waiting.limited_since,
            until=self.waiting.retry_at if self.is_open else None,
            reason=self._reason,
            error=self._error,
            without=self._without,
        )

    def takes_no(self, without: tuple[str, ...]) -> None:
        """Note which parts of requests the judge does not take."""
        self._without = without

    def again(self) -> None:
        """Book a further request of a call, which goes out now."""
        now = self.clock()
        state = self.waiting.booked(now)
        self.waiting = state.sent(state.asked, now)

    async def judgement(
        self, ask: Callable[[Judge], Awaitable[Found]], patience: Patience
    ) -> Found:
        """Have one judgement made by this judge, and note how it ended."""
        tries, one = self.is_open, OneJudgement(self, patience)
        self._tried = self._tried or tries
        judge: Judge = one
        if self.kept is not None:
            judge = CachedJudge(one, self.settings, self.kept, on_replay=one.note_replay)
        try:
            found = await ask(judge)
        except JudgeWithheldError:
            raise  # by our own limits: it says nothing about the judge
        except JudgeBusyError as error:
            self._reason, self._error = error.reason, str(error)
            raise
        except JudgeUnavailableError as error:
            self.note_failure(error)
            raise
        except (JudgeRefusalError, JudgeReplyError) as error:
            if not isinstance(error, JudgeTooLongError) or error.asked:
                self.waiting = self.waiting.answered()
            raise
        else:
            if one.asked or not one.replayed:  # kept replies say nothing about the judge
                self.waiting = self.waiting.answered()
            return found
        finally:
            self._tried = self._tried and not tries

    def note_failure(self, error: JudgeUnavailableError, *, opens: bool = False) -> None:
        """Note a judgement without an answer. opens: the next judge is asked from now on."""
        self._reason, self._error = error.reason, str(error)
        self.waiting = self.waiting.failed(
            self.clock(), longest_s=LONGEST_FAILING_S, opens_after=OPENS_AFTER, opens=opens
        )

    @property
    def is_limited_for_long(self) -> bool:
        """It has refused all requests for so long, or asked for such a pause, that the next judge
        is asked."""
        now, since = self.clock(), self.waiting.limited_since
        limited_s = 0.0 if since is None else now - since
        return max(limited_s, self.waiting.paused_until - now) >= LONGEST_STAY_S

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        schema: Mapping[str, Any],
        one: OneJudgement,
    ) -> JudgeReply:
        """Make one call of a judgement. See `Judge.complete`.

        Raises also: JudgeWithheldError, JudgeBusyError, both also without a call; what
            `Meter.metered` raises.
        """
        until = self.clock() + one.patience_s
        estimate = await self.meter.estimate(messages, schema)
        refused = False
        while True:
            number = await self._admit(until, refused=refused)

            async def send(number: int = number) -> JudgeReply:
                self.waiting = self.waiting.sent(number, self.clock())
                return await self.judge.complete(messages, schema)

            try:
                reply = await self.meter.metered(send, estimate, begun=one.begun)
                one.begun = one.asked = True
                self.waiting = self.waiting.accepted(number)
                return reply
            except JudgeBusyError as error:
                refused = True
                self.waiting = self.waiting.limited(number, self.clock(), error.retry_after_s)
                if self._free_at()[0] > until:
                    raise
            except JudgeUnavailableError as error:
                one.begun = one.begun or error.maybe_paid
                raise
            finally:
                self.waiting = self.waiting.ended(number)

    async def _admit(self, until: float, *, refused: bool) -> int:
        """Wait until one call may go out, and book it. Returns: its number.

        refused: it was made before, so it does not queue again.
        Raises: JudgeLimitedError, JudgeBusyError: that takes longer than `until`, as it looks now.
        """
        ahead = 0 if refused else self._queued
        self._check(*self.waiting.free_after(ahead, self.clock(), self._per_minute), until)
        self._queued += 1
        self._refused += refused
        try:
            async with nullcontext() if refused else self._turn:
                while True:
                    free_at, reason = self._free_at()
                    if reason == "free" and (refused or not self._refused):
                        self.waiting = self.waiting.booked(free_at)
                        return self.waiting.asked
                    self._check(free_at, reason, until)
                    wait_s = max(free_at - self.clock(), SHORTEST_S)
                    await asyncio.sleep(min(wait_s, LOOK_AGAIN_S))
        finally:
            self._refused -= refused
            self._queued -= 1

    def _free_at(self) -> tuple[float, Reason]:
        return self.waiting.free_at(self.clock(), self._per_minute, trying=True)

    def _check(self, free_at: float, reason: Reason, until: float) -> None:
        if free_at <= until or reason == "free":
            return
        left_s = free_at - self.clock()
        if reason == "limit":
            raise JudgeLimitedError(
                f"judge.requests_per_minute is reached for another {left_s:.0f} s",
                until=free_at,
            )
        asks = "asked for a pause" if reason == "pause" else "refuses more requests"
        raise JudgeBusyError(
            f"judge {self.judge.model} {asks}, which lasts another {left_s:.0f} s",
            retry_after_s=left_s,
        )


class OneJudgement:
    """The judge of one judgement: its provider, asked when that is free."""

    def __init__(self, provider: Provider, patience: Patience) -> None:
        self._provider = provider
        self._patience = patience
        self.begun = self.asked = self.replayed = False
        """It has cost something; it has been answered; it has kept replies."""

    @property
    def model(self) -> str:
        return self._provider.judge.model

    @property
    def patience_s(self) -> float:
        return self._patience.begun_s if self.begun else self._patience.first_s

    def note_replay(self) -> None:
        self.replayed = True

    async def context_tokens(self) -> int | None:
        return await context_tokens_of(self._provider.judge)

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        return await self._provider.ask(messages, schema, self)


class Panel:
    """Judges in the order in which they are asked. As a `Judge`, each call is one judgement."""

    def __init__(self, providers: Sequence[Provider], patience: Patience) -> None:
        self._providers = tuple(providers)
        self._patience = patience
        self._away: set[str] = set()
        """Judges whose failure was logged, and that gave no judgement since."""

    @property
    def model(self) -> str:
        return self._providers[0].judge.model

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        return await self.by_one(lambda judge: judge.complete(messages, schema))

    async def by_one(self, ask: Callable[[Judge], Awaitable[Found]]) -> Found:
        """See `JudgePanel.by_one`. Raises also: JudgeWithheldError, for which no other is asked."""
        if len(self._providers) == 1:  # always asked: its callers wait while it is away
            return await self._providers[0].judgement(ask, self._patience)
        failures: dict[str, JudgeUnavailableError] = {}
        for provider in self._providers:
            if not provider.admits():
                continue
            model = provider.judge.model
            try:
                found = await provider.judgement(ask, self._patience)
            except JudgeWithheldError:
                raise
            except JudgeUnavailableError as error:
                if isinstance(error, JudgeBusyError):
                    if not provider.is_limited_for_long:
                        raise  # the callers wait for its end
                    provider.note_failure(error, opens=True)
                failures[model] = error
            else:
                if model in self._away:
                    self._away.discard(model)
                    log.info("judge_fallback_over", back=model)
                return found
            if provider is not self._providers[-1] and model not in self._away:
                self._away.add(model)
                log.warning("judge_fallback", away=model, error=str(failures[model]))
        raise self._nobody(failures)

    def seen(self) -> tuple[JudgeSeen, ...]:
        return tuple(one.seen() for one in self._providers)

    def _nobody(self, failures: Mapping[str, JudgeUnavailableError]) -> JudgeUnavailableError:
        """Return the error of a judgement that no judge made. Of judges that were not asked now it
        has the kind of the last error alone: its words may quote another user's prompt."""
        said = "; ".join(
            f"{one.model}: {failures.get(one.model, one.reason)}"
            for one in self.seen()
            if one.error
        )
        asked_all = len(failures) == len(self._providers)
        if asked_all and all(isinstance(one, JudgeNoCreditError) for one in failures.values()):
            return JudgeNoCreditError(f"no judge's account has credit: {said}")
        if asked_all and all(isinstance(one, PERMANENT) for one in failures.values()):
            return JudgeRejectedError(f"every judge rejects the question: {said}")
        return JudgeUnavailableError(f"no judge answers: {said}")
