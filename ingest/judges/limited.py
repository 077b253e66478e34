"""Keep one judge to so many calls and tokens a minute.

The limits hold for each process by itself. Tokens are taken by an estimate before a call and
corrected by what the provider reports. A wait is bounded: a judgement that would wait for longer is
put off (`JudgeLimitedError`); one that has paid for a call already waits for its next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from ingest.errors import JudgeLimitedError, JudgeUnavailableError
from ingest.judges.bucket import Bucket
from ingest.judges.meter import Ticket, estimate_call
from ingest.ruler.judge import Judge, JudgeReply, context_tokens_of
from sidecar.settings import Judge as JudgeSettings


class Limits:
    """What one judge may be asked in a minute. Shared by all in a process that ask it."""

    def __init__(self, settings: JudgeSettings) -> None:
        now = monotonic()
        calls, tokens = settings.requests_per_minute, settings.tokens_per_minute
        self.calls = Bucket(calls, now=now) if calls else None
        self.tokens = Bucket(tokens, now=now) if tokens else None
        self.params = settings.params

    def take(self, tokens: int, *, longest_s: float) -> float:
        """Take one call and its tokens. Returns: seconds to wait before it.

        Raises: JudgeLimitedError, with nothing taken.
        """
        now = monotonic()
        needs = [
            (bucket, units)
            for bucket, units in ((self.calls, 1), (self.tokens, tokens))
            if bucket is not None
        ]
        wait_s = max((bucket.free_in_s(units, now) for bucket, units in needs), default=0.0)
        if wait_s > longest_s:
            raise JudgeLimitedError(
                "judge.requests_per_minute or judge.tokens_per_minute is reached for another "
                f"{wait_s:.0f} s",
                until=time.time() + wait_s,
            )
        for bucket, units in needs:
            bucket.take(units, now, longest_s=wait_s)
        return wait_s

    def used(self, *, taken: int, tokens: int) -> None:
        """Correct what was taken for a call by what it used."""
        if self.tokens is not None:
            self.tokens.correct(taken=taken, used=tokens, now=monotonic())


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
        taken = estimate_call(messages, schema, self._limits.params, None).tokens
        used: int | None = taken
        try:
            await asyncio.sleep(self._limits.take(taken, longest_s=longest_s))
            reply = await self._judge.complete(messages, schema)
            if reply.prompt_tokens is not None and reply.completion_tokens is not None:
                used = reply.prompt_tokens + reply.completion_tokens
            return reply
        except JudgeLimitedError:
            used = None  # nothing was taken
            raise
        except JudgeUnavailableError as error:
            used = taken if error.maybe_paid else 0
            raise
        finally:
            if used is not None:
                self._limits.used(taken=taken, tokens=used)
