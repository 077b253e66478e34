"""The worker that has groups judged: claim `sampled`, ask, write `scored` or `set_aside`.

A group is written in one transaction together with every judge call that was made for it. A judge
that does not answer stops nothing else: its group is given back as it was, and the worker waits,
longer each time, trying one group at a time until one gets through.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

import structlog
from sqlalchemy import update

from ingest.errors import StoreError
from ingest.judge import Judge
from ingest.judge_group import Fate, Scored, SetAside, Unanswered, judge_group
from ingest.outage import Outage
from ingest.records import Group
from ingest.ruler import ATTEMPTS, JudgeCall
from ingest.ruler_prompt import rubric_hash
from ingest.store.database import Database, count
from ingest.store.groups import (
    SAMPLED,
    claim_groups,
    load_group,
    mark_scored,
    release_group,
    set_aside,
)
from ingest.store.judge_calls import save_judge_calls
from ingest.store.models import GroupRow
from sidecar.settings import Judge as JudgeSettings

SEED_BITS = 29
"""What `score_answers` takes. Drawn afresh for each group: nobody can foresee its ids."""
POLL_S = 0.5
LEASE_SLACK_S = 60.0
GIVEN_BACK_S = 5.0
"""A group without an answer waits this much longer than the worker does: the judge is tried with
another one first, so that a group that only it chokes on does not hold up the rest."""

log = structlog.get_logger()


class JudgingWorker:
    """Judges groups until told to stop. Several may run, in one process or in many."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: JudgeSettings,
        *,
        clock: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        self._database = database
        self._judge = judge
        self._settings = settings
        self._clock = clock
        self._draw_seed = draw_seed
        self._rubric_hash = rubric_hash(settings.rubric)
        self._lease_s = settings.passes * ATTEMPTS * settings.timeout_s + LEASE_SLACK_S
        self._outage = Outage()

    async def run(self, stop: asyncio.Event) -> None:
        """Judge what there is, at most `judge.concurrency` groups at once, until `stop` is set.

        Groups in flight are then dropped and given back: they are not lost, only asked again.
        """
        in_flight: dict[asyncio.Task[None], str] = {}
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                for group_id in await self._claim(self._room() - len(in_flight)):
                    in_flight[asyncio.create_task(self._work(group_id))] = group_id
                await asyncio.wait(
                    {stopping, *in_flight}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in in_flight if task.done()]:
                    del in_flight[task]
                    task.result()
        finally:
            stopping.cancel()
            for task in in_flight:
                task.cancel()
            await asyncio.gather(stopping, *in_flight, return_exceptions=True)
            await asyncio.to_thread(self._give_back, list(in_flight.values()))

    async def step(self) -> int:
        """Judge waiting groups, as many as may be in flight. Returns: how many were tried."""
        group_ids = await self._claim(self._room())
        await asyncio.gather(*(self._work(group_id) for group_id in group_ids))
        return len(group_ids)

    def _room(self) -> int:
        """Groups that may be in flight now: all, one to try the judge again, or none."""
        if not self._outage.lasts:
            return self._settings.concurrency
        return 1 if self._clock() >= self._outage.retry_at else 0

    async def _claim(self, limit: int) -> list[str]:
        if limit <= 0:
            return []
        try:
            return await asyncio.to_thread(self._claim_now, limit)
        except StoreError as error:
            log.warning("judging_waits_for_store", error=str(error))
            return []

    def _claim_now(self, limit: int) -> list[str]:
        with self._database.write() as session:
            return claim_groups(
                session, SAMPLED, limit=limit, now=self._clock(), lease_s=self._lease_s
            )

    async def _work(self, group_id: str) -> None:
        try:
            group = await asyncio.to_thread(self._load, group_id)
            if group is None:
                return
            calls: list[JudgeCall] = []
            fate = await judge_group(
                group, self._judge, self._settings, seed=self._draw_seed(), on_call=calls.append
            )
            self._note_outage(fate)
            await asyncio.to_thread(self._record, group_id, calls, fate)
        except StoreError as error:
            # The lease runs out, and the group is judged again.
            log.warning("judgement_not_stored", group_id=group_id, error=str(error))

    def _load(self, group_id: str) -> Group | None:
        with self._database.read() as session:
            return load_group(session, group_id)

    def _note_outage(self, fate: Fate) -> None:
        if isinstance(fate, Unanswered):
            if self._outage.unanswered(self._clock()):
                log.warning("judge_down", model=self._judge.model, error=fate.detail)
        elif isinstance(fate, Scored) or fate.asked:
            lasted_s = self._outage.answered(self._clock())
            if lasted_s is not None:
                log.warning("judge_up", model=self._judge.model, lasted_s=round(lasted_s, 1))

    def _record(self, group_id: str, calls: Sequence[JudgeCall], fate: Fate) -> None:
        now = self._clock()
        bad_replies = sum(not call.ok for call in calls)
        with self._database.write() as session:
            save_judge_calls(session, group_id, calls, rubric_hash=self._rubric_hash, now=now)
            session.execute(
                update(GroupRow)
                .where(GroupRow.group_id == group_id)
                .values(attempts=GroupRow.attempts + bad_replies)
            )
            if isinstance(fate, Scored):
                judgement = fate.judgement
                changed = mark_scored(
                    session,
                    group_id,
                    judgement.scores,
                    judgement.explanations,
                    self._judge.model,
                    self._rubric_hash,
                    now,
                )
            elif isinstance(fate, SetAside):
                changed = set_aside(session, group_id, fate.reason)
            else:
                count(session, "judge_calls", "unanswered")
                release_group(session, group_id, until=self._outage.retry_at + GIVEN_BACK_S)
                return
        _log_fate(group_id, fate, changed)

    def _give_back(self, group_ids: Sequence[str]) -> None:
        try:
            with self._database.write() as session:
                for group_id in group_ids:
                    release_group(session, group_id)
        except StoreError as error:
            log.warning("judging_leases_left", groups=len(group_ids), error=str(error))


def _log_fate(group_id: str, fate: Scored | SetAside, changed: bool) -> None:
    if not changed:
        log.info("judgement_came_second", group_id=group_id)
    elif isinstance(fate, SetAside):
        log.warning("group_set_aside", group_id=group_id, reason=fate.reason, detail=fate.detail)
    else:
        scores = fate.judgement.scores
        log.info("group_scored", group_id=group_id, low=min(scores), high=max(scores))
