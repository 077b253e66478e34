"""Keep what the gate has paid for until the store takes it.

A comparison is stored in one transaction with every judge call that was made for it, also those of
earlier attempts that an outage ended. While the store is locked or away it waits in memory, and
control waits for it a while when it stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy.orm import Session

from deploy.canary import gate_store
from deploy.canary.gate_answers import Answered, as_rows, storable_calls
from deploy.canary.gate_store import HeldOutPrompt, Kept, comparison_id
from deploy.evidence.quality import Fault
from deploy.records import Canary
from deploy.registry.gate_rule import mean_difference
from ingest.privacy.screen import Screen
from ingest.ruler.calls import count_call, save_judge_calls
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import JudgeCall, Judgement
from ingest.store.patience import patiently
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, count

log = structlog.get_logger()

SCORED = "scored"
LONGEST_KEPT_S = 3600.0
"""Longest time that a comparison is kept for a store that refuses it; then it is made again."""
STOP_GRACE_S = 15.0
"""Longest time that a stop of control waits for comparisons to be stored, as score does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of one comparison."""

    status: str
    """`scored`, or the reason for setting it aside."""
    answered: list[Answered]
    judgement: Judgement | None = None
    asked: bool = True
    """False when the judge was not asked."""
    fault: Fault | None = None
    """Whose answers kept the judge from scoring it; None when it is scored."""
    place: int = 0
    """Its number in the order of drawing."""
    calls: list[JudgeCall] = field(default_factory=list)


class Keeper:
    """Writes comparisons and judge calls of one gate."""

    def __init__(
        self,
        database: Database,
        *,
        screen: Screen,
        judge_model: str,
        judging: JudgeSettings,
        clock: Callable[[], float],
    ) -> None:
        """screen: the privacy policies by which answers are stored. judging: the settings of the
        gate's judge."""
        self._database = database
        self._screen = screen
        self._judge_model = judge_model
        self._judging = judging
        self._clock = clock
        self._storing: set[asyncio.Task[None]] = set()
        self._lost = 0
        """Paid calls that could not be stored, and are not counted yet."""

    async def keep(self, canary: Canary, prompt: HeldOutPrompt, ended: Ended) -> None:
        """Store a comparison; a cancelled caller does not end that.

        Raises: StoreError when the store refuses for `LONGEST_KEPT_S`.
        """
        task = asyncio.create_task(self._keep(canary, prompt, ended))
        self._storing.add(task)
        task.add_done_callback(self._forget)
        await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait for comparisons that the store has not taken yet, then give them up."""
        if not self._storing:
            return
        log.info("gate_stops_when_stored", comparisons=len(self._storing), longest_s=STOP_GRACE_S)
        _, late = await asyncio.wait(set(self._storing), timeout=STOP_GRACE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if late:
            log.error("gate_comparisons_lost", comparisons=len(late), why="control stops")

    async def keep_calls(self, subject: str, calls: Sequence[JudgeCall]) -> None:
        """Store calls that belong to no comparison, made with the default rubric.

        Raises: StoreError.
        """
        await asyncio.to_thread(self._save_calls, subject, calls)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._storing.discard(task)
        if not task.cancelled():
            task.exception()  # raised where it is awaited; a cancelled caller awaits it no more

    async def _keep(self, canary: Canary, prompt: HeldOutPrompt, ended: Ended) -> None:
        name, project = comparison_id(canary, prompt), prompt.project
        judgement = ended.judgement
        rows = await asyncio.to_thread(
            as_rows,
            ended.answered,
            judgement,
            screen=self._screen,
            project=project,
            request=prompt.request,
        )
        calls = await asyncio.to_thread(
            storable_calls, ended.calls, screen=self._screen, project=project
        )
        kept = Kept(
            status=ended.status,
            difference=_difference(rows, "champion") if ended.status == SCORED else None,
            anchor_difference=_difference(rows, "anchor") if ended.status == SCORED else None,
            fault=ended.fault,
            place=ended.place,
            answers=rows,
            judge_model=self._judge_of(ended),
            rubric_hash=self._hash_of(project) if ended.asked else None,
            disagreement=judgement.disagreement if judgement is not None else None,
        )

        def on_failure(error: StoreError, pause_s: float) -> None:
            log.warning(
                "gate_not_stored", comparison=name, error=str(error), again_in_s=round(pause_s, 1)
            )

        try:
            await patiently(
                lambda: self._save(canary, prompt, kept, calls),
                on_failure=on_failure,
                longest_s=LONGEST_KEPT_S,
            )
        except StoreError as error:
            self._lost += sum(not call.reply.cached for call in calls)
            log.error("gate_comparison_lost", comparison=name, calls=len(calls), error=str(error))
            raise

    def _judge_of(self, ended: Ended) -> str | None:
        """Return who judged: a fallback, when the first judge was away; None: nobody was asked."""
        if not ended.asked:
            return None
        return ended.judgement.judge_model if ended.judgement is not None else self._judge_model

    def _save(
        self, canary: Canary, prompt: HeldOutPrompt, kept: Kept, calls: Sequence[JudgeCall]
    ) -> None:
        name = comparison_id(canary, prompt)
        lost, self._lost = self._lost, 0

        def write(session: Session) -> None:
            count(session, "judge_calls", "lost", lost)
            if gate_store.save_comparison(session, canary, prompt, kept):
                self._add_calls(session, name, calls, self._hash_of(prompt.project))
                return
            for call in calls:  # the canary has ended, or the prompt is deleted: only counted
                count_call(session, call)

        try:
            self._database.repeat(write)
        except StoreError:
            self._lost += lost
            raise

    def _save_calls(self, subject: str, calls: Sequence[JudgeCall]) -> None:
        with self._database.write() as session:
            self._add_calls(session, subject, calls, hash_of(self._judging))

    def _hash_of(self, project: str) -> str:
        return hash_of(self._judging.of(project))

    def _add_calls(
        self, session: Session, subject: str, calls: Sequence[JudgeCall], rubric_hash: str
    ) -> None:
        save_judge_calls(session, subject, calls, rubric_hash=rubric_hash, now=self._clock())


def _difference(rows: Sequence[dict[str, Any]], other: str) -> float | None:
    """Return the mean score of the candidate minus another arm's; None without its answers."""
    scores = {
        arm: [one["score"] for one in rows if one["arm"] == arm and one["score"] is not None]
        for arm in ("candidate", other)
    }
    if not scores[other]:
        return None
    return mean_difference(scores["candidate"], scores[other])
