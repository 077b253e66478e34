"""A judge that keeps to the pause its provider asked for (`Retry-After`), whoever wants to ask.

Scoring and best of N ask one provider, and a group of several passes asks it several times. Without
this, those under way would ask on while the worker that met the limit waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from ingest.errors import JudgeBusyError, JudgeUnavailableError
from ingest.privacy.texts import JudgeView
from ingest.records import Answer, Group
from ingest.ruler.judge import Judge, JudgeReply, context_tokens_of, replies_kept_for
from ingest.ruler.ruler import GroupOutcome, JudgeCall, judge_group
from sidecar.backoff import Backoff
from sidecar.settings import Judge as JudgeSettings

# Back-off for a service that does not answer. Pure: the caller passes the time.

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


# Probe the judge with a group of our own choice: does it work at all?

SUBJECT = "probe"
"""Subject of the probe's calls in the store, in place of a group's id."""


async def ask_probe(
    judge: Judge,
    settings: JudgeSettings,
    *,
    seed: int,
    on_call: Callable[[JudgeCall], None],
    group: Group | None = None,
    view: JudgeView | None = None,
) -> GroupOutcome:
    """Send the probe, in one pass.

    group: a group that was scored before; None: the sum question.
    """
    one_pass = settings.model_copy(update={"passes": 1})
    with replies_kept_for(None):  # a kept reply would not tell whether the judge works
        return await judge_group(
            group or _sum(), judge, one_pass, seed=seed, on_call=on_call, view=view
        )


def _sum() -> Group:
    request = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
    answers = ("2 + 3 = 5", "2 + 3 = 6")
    return Group(
        group_id=SUBJECT,
        exchange_id=SUBJECT,
        session_key="",
        adapter="",
        request=json.dumps(request).encode(),
        prompt_token_ids=(),
        answers=tuple(
            Answer(
                index=index,
                origin="served",
                message=json.dumps({"role": "assistant", "content": text}).encode(),
            )
            for index, text in enumerate(answers)
        ),
    )
