"""Whole tasks in place of single answers: the runner attempts a held-out task with each arm.

Where sessions are learned from and a runner is there, the gate and the ramp ask for no next answer:
what looks best next may make the task fail. The comparison is the same in all else: a task counts
once, arms are attempted in random order, scores are how the attempts ended (0..1), and no judge is
asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import httpx

from deploy.canary.gate_answers import Answered, Given
from deploy.canary.gate_store import HeldOutPrompt
from deploy.records import Canary
from ingest.errors import EngineDownError, NoRoomError, SamplingError
from ingest.ruler.ruler import Judgement
from ingest.tasks.attempts import Played, Player, Task, TaskGoneError, end_attempt, spent_today
from ingest.tasks.runner import Answer
from ingest.vllm.sampler import Room
from sidecar.settings import Settings
from sidecar.store.database import Database

EXAM: Final = "exam"
"""Value of `rehearsal.result` and `task_member.excluded`: nothing is learned from it."""
POLL_S: Final = 2.0
"""Pause while users leave no capacity."""
TRIES: Final = 2
"""How often an attempt is made, if it fails."""


class NoOutcomeError(Exception):
    """Of no attempt at a task it is known how it ended."""


class TaskExam:
    """Attempts tasks with the adapters of a canary, one attempt at a time."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        room: Room,
        *,
        now: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """room: tells whether users leave capacity. transport: a fake runner, for tests."""
        self._database = database
        self._room = room
        self._now = now
        self._tokens_per_day = settings.rehearsals.tokens_per_day
        self._player = Player(database, settings, now=now, transport=transport)
        self._one = asyncio.Lock()

    async def ask(self, canary: Canary, prompt: HeldOutPrompt, adapter: str, number: int) -> Given:
        """Attempt a task, as `Ask`. What is given has no reward where the attempt failed, twice, or
        its end is not known.

        Raises: EngineDownError when the runner cannot be asked, NoRoomError when users need vLLM or
            the day's tokens are spent, SamplingError when the task is deleted.
        """
        task = Task(
            exchange_id=prompt.exchange_id,
            project=prompt.project,
            messages=prompt.request["messages"],
            tools=prompt.request.get("tools") or [],
        )
        words = ""
        for _ in range(TRIES):
            async with self._one:
                await self._wait_for_room()
                try:
                    played = await self._player.play(task, adapter, number)
                except TaskGoneError as error:
                    raise SamplingError(str(error)) from error
                why, tokens = await self._why_not(played, adapter)
                await asyncio.to_thread(self._end, played, why, tokens)
            if played.is_away:
                raise EngineDownError(why or "")
            if why is None and played.answer is not None:
                return _given(value_of(played.answer), "its end is not known")
            words = f"it failed: {why}"
        return _given(None, words)

    def judge(self, answered: Sequence[Answered]) -> Judgement:
        """Return how the attempts ended as their scores.

        An attempt that failed, or whose end is not known, counts as 0 beside others of which it is
        known, whichever adapter answered: left out, those of a candidate whose bad ends stay
        unknown would make it look better. Raises: NoOutcomeError.
        """
        if all(one.reward is None for one in answered):
            raise NoOutcomeError("the runner tells of no attempt how it ended")
        scores = tuple(one.reward or 0.0 for one in answered)
        words = tuple("" for _ in scores)
        return Judgement(scores=scores, explanations=words, disagreement=None, calls=())

    async def _wait_for_room(self) -> None:
        """Raises: NoRoomError."""
        while True:  # the attempts before this one would be lost
            try:
                if await self._room.is_open():
                    break
            except SamplingError as error:
                raise NoRoomError(str(error)) from error
            await asyncio.sleep(POLL_S)
        if not await asyncio.to_thread(self._has_tokens):
            raise NoRoomError("today's rehearsals.tokens_per_day are spent")

    async def close(self) -> None:
        await self._player.close()

    async def _why_not(self, played: Played, adapter: str) -> tuple[str | None, int]:
        """Return why an attempt counts for nothing (None: it counts), and its tokens."""
        if played.answer is None:
            return f"the runner: {played.detail}", 0
        found = await self._player.arrived([played.session_id])
        by, tokens = found.get(played.session_id, ("", 0))
        if not found:
            return "it asked the model nothing with the headers of the attempt", 0
        return (None if by == adapter else f"{by or 'several adapters'} answered it"), tokens

    def _has_tokens(self) -> bool:
        with self._database.read() as session:
            _, tokens = spent_today(session, now=self._now())
        return tokens < self._tokens_per_day

    def _end(self, played: Played, why: str | None, tokens: int) -> None:
        kept = (why is None and played.answer) or Answer()
        result = EXAM if why is None else "exam_failed"
        row = {"ended_at": self._now(), "detail": why, "tokens": tokens}
        with self._database.write(alone=False) as session:
            end_attempt(session, played.session_id, kept, result=result, excluded=EXAM, **row)


def _given(reward: float | None, otherwise: str) -> Given:
    text = otherwise if reward is None else f"it ended with {reward:g}"
    message = {"role": "assistant", "content": text}
    return Given(message=message, finish_reason="stop", reward=reward)


def value_of(answer: Answer) -> float | None:
    """Return how an attempt ended, 0..1; None where it is not known, or on another scale."""
    if answer.success is not None:
        return float(answer.success)
    value = answer.outcome
    return value if value is not None and 0.0 <= value <= 1.0 else None
