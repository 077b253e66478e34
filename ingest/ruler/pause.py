"""A judge that keeps to the pause its provider asked for (`Retry-After`), whoever wants to ask.

Scoring and best of N ask one provider, and a group of several passes asks it several times. Without
this, those under way would ask on while the worker that met the limit waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from ingest.errors import JudgeBusyError
from ingest.ruler.judge import Judge, JudgeReply, context_tokens_of
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S

LONGEST_STAY_S = 30.0
"""A call between two passes of a group waits so long: else the first pass was paid for nothing.
The group's lease has a minute to spare."""


class Pause:
    """How long one provider is not to be asked. Shared by those that ask it."""

    def __init__(self) -> None:
        self._ends_at = 0.0

    @property
    def left_s(self) -> float:
        return self._ends_at - monotonic()

    def asked_for(self, seconds: float) -> None:
        """Note a pause that the provider asked for; of a longer one, `LONGEST_RETRY_AFTER_S`."""
        self._ends_at = max(self._ends_at, monotonic() + min(seconds, LONGEST_RETRY_AFTER_S))


class PausingJudge:
    """Asks the judge, but not while its provider wants a pause."""

    def __init__(self, judge: Judge, pause: Pause, *, longest_stay_s: float) -> None:
        """longest_stay_s: a shorter rest of the pause is waited for; 0: users wait, never stay."""
        self._judge = judge
        self._pause = pause
        self._longest_stay_s = longest_stay_s

    @property
    def model(self) -> str:
        return self._judge.model

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """See `Judge.complete`. Raises also: JudgeBusyError, without a call, during a pause."""
        stays_until = monotonic() + self._longest_stay_s
        while (left_s := self._pause.left_s) > 0:
            if monotonic() + left_s > stays_until:
                raise JudgeBusyError(
                    f"judge {self.model} asked for a pause, which lasts another {left_s:.0f} s",
                    retry_after_s=left_s,
                )
            await asyncio.sleep(left_s)
        try:
            return await self._judge.complete(messages, schema)
        except JudgeBusyError as error:
            self._pause.asked_for(error.retry_after_s)
            raise

    async def context_tokens(self) -> int | None:
        """See `SizedJudge.context_tokens`."""
        return await context_tokens_of(self._judge)
