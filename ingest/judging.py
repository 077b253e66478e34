"""The worker that has groups judged: claim `sampled`, ask, write `scored` or `set_aside`.

A group is written in one transaction together with every judge call that was made for it. A call
without a usable answer stops nothing for good: `ingest.judge_blame` finds out whether the group or
the judge is at fault. The group's own faults are counted, and after a few it is set aside with the
judge's words; for a judge that is down the worker waits, longer each time, and blames no group.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

import structlog
from sqlalchemy import update

from ingest.errors import JudgeBusyError, JudgeUnavailableError, StoreError
from ingest.judge import Judge
from ingest.judge_blame import DEFECT, Blame, Cleared, Failed
from ingest.judge_errors import ERROR_CHARACTERS, storable
from ingest.judge_group import Fate, Scored, SetAside, Unanswered, judge_group
from ingest.judge_probe import SUBJECT, ask_probe
from ingest.outage import LAST_DELAY_S, LONGEST_RETRY_AFTER_S
from ingest.records import Group
from ingest.ruler import ATTEMPTS, SEED_BITS, JudgeCall
from ingest.ruler_prompt import rubric_hash
from ingest.store.database import Database, count
from ingest.store.groups import load_group, mark_scored, set_aside
from ingest.store.judge_calls import save_judge_calls
from ingest.store.judging import charge, claim_for_judge, give_back, hold
from ingest.store.models import GroupRow
from sidecar.settings import Judge as JudgeSettings

POLL_S = 0.5
LEASE_SLACK_S = 60.0
GIVEN_BACK_S = 5.0
"""A group that failed during an outage waits this much longer than the worker does."""
LONGEST_SETUP_WAIT_S = 300.0
"""The wait grows up to this while the judge refuses the probe: a person has to act, and useless
replies may cost money."""

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
        """draw_seed: drawn afresh for each group, so that nobody can foresee its ids."""
        self._database = database
        self._judge = judge
        self._settings = settings
        self._clock = clock
        self._draw_seed = draw_seed
        self._rubric_hash = rubric_hash(settings.rubric)
        self._lease_s = settings.passes * ATTEMPTS * settings.timeout_s + LEASE_SLACK_S
        self._blame = Blame()
        self._suspect: str | None = None
        """The group in flight that a process died over: one at a time."""
        self._said: str | None = None
        """What was last logged of the outage that lasts."""

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
                if not in_flight and self._blame.wants_probe(self._clock()):
                    in_flight[asyncio.create_task(self._probe())] = SUBJECT
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
            held = [failed.group_id for failed in self._blame.release()]
            await asyncio.to_thread(self._give_back, [*in_flight.values(), *held])

    async def step(self) -> int:
        """Judge waiting groups, as many as may be in flight. Returns: how many were tried."""
        group_ids = await self._claim(self._room())
        await asyncio.gather(*(self._work(group_id) for group_id in group_ids))
        if self._blame.wants_probe(self._clock()):
            await self._probe()
        return len(group_ids)

    def _room(self) -> int:
        return self._blame.room(self._settings.concurrency, self._clock())

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
            claimed = claim_for_judge(
                session,
                limit=limit,
                now=self._clock(),
                lease_s=self._lease_s,
                suspects=self._suspect is None,
            )
        self._suspect = claimed.suspect or self._suspect
        return claimed.group_ids

    async def _work(self, group_id: str) -> None:
        try:
            await self._judge_one(group_id)
        except StoreError as error:
            # The lease runs out, and the group is judged again.
            log.warning("judgement_not_stored", group_id=group_id, error=str(error))
        except Exception as error:  # one group must not end the judging of all the others
            log.exception("judging_failed", group_id=group_id)
            self._blame.failed(_defect(group_id, error), self._clock())
        finally:
            if self._suspect == group_id:
                self._suspect = None

    async def _judge_one(self, group_id: str) -> None:
        group = await asyncio.to_thread(self._load, group_id)
        if group is None:
            return
        calls: list[JudgeCall] = []
        fate = await judge_group(
            group, self._judge, self._settings, seed=self._draw_seed(), on_call=calls.append
        )
        failed = self._failed(group_id, fate)
        await asyncio.to_thread(self._record, group_id, calls, fate, failed)
        if isinstance(fate, Scored):
            await self._clear(self._blame.works(self._clock()))
        elif failed is not None:
            await self._hold_against(failed, fate)

    async def _hold_against(self, failed: Failed, fate: Fate) -> None:
        wait_s = fate.retry_after_s if isinstance(fate, Unanswered) else 0.0
        if self._blame.failed(failed, self._clock(), retry_after_s=wait_s):
            self._said = failed.reason
            log.warning("judge_busy", model=self._judge.model, error=failed.detail)
        if failed.reason == JudgeBusyError.reason:
            until = self._blame.outage.retry_at + GIVEN_BACK_S
            await asyncio.to_thread(self._give_back, [failed.group_id], until)

    def _failed(self, group_id: str, fate: Fate) -> Failed | None:
        """What is to be held against the group or the judge, once it is known which."""
        if isinstance(fate, Unanswered):
            return Failed(group_id=group_id, reason=fate.reason, detail=fate.detail)
        if isinstance(fate, SetAside) and fate.asked and not self._blame.unusable():
            return Failed(group_id=group_id, reason=fate.reason, detail=fate.detail, final=True)
        return None

    async def _probe(self) -> None:
        """Find out by a question of our own whether the judge works; see `ingest.judge_blame`."""
        calls: list[JudgeCall] = []
        fate: Fate
        try:
            fate = await ask_probe(
                self._judge, self._settings, seed=self._draw_seed(), on_call=calls.append
            )
        except Exception as error:  # what fails over every group fails over the probe too
            log.exception("judge_probe_failed")
            fate = Unanswered(detail=_defect(SUBJECT, error).detail, reason=DEFECT)
        try:
            await asyncio.to_thread(self._record_probe, calls, fate)
            if isinstance(fate, Scored):
                await self._clear(self._blame.works(self._clock(), by_probe=True))
            else:
                await self._wait(fate)
        except StoreError as error:
            log.warning("judgement_not_stored", group_id=SUBJECT, error=str(error))

    async def _clear(self, cleared: Cleared) -> None:
        """The judge works: what failed before that was the groups' own fault."""
        if cleared.outage_s is not None:
            self._said = None
            log.warning("judge_up", model=self._judge.model, lasted_s=round(cleared.outage_s, 1))
        if cleared.own_faults:
            await asyncio.to_thread(self._charge, cleared.own_faults)

    async def _wait(self, fate: SetAside | Unanswered) -> None:
        """The judge does not work: nobody is to blame, and all wait."""
        passes = isinstance(fate, Unanswered) and fate.reason in _PASSING
        self._blame.down(
            self._clock(),
            longest_s=LAST_DELAY_S if passes else LONGEST_SETUP_WAIT_S,
            retry_after_s=fate.retry_after_s if isinstance(fate, Unanswered) else 0.0,
        )
        if self._said != fate.reason:
            self._said = fate.reason
            say = log.warning if passes else log.error
            to_do = (
                "" if passes else "it refuses even a sum: see judge.model, api_base, key, params"
            )
            say(
                "judge_down",
                model=self._judge.model,
                reason=fate.reason,
                error=fate.detail,
                to_do=to_do,
            )
        released = [failed.group_id for failed in self._blame.release()]
        until = self._blame.outage.retry_at + GIVEN_BACK_S
        await asyncio.to_thread(self._give_back, released, until)

    def _load(self, group_id: str) -> Group | None:
        with self._database.read() as session:
            return load_group(session, group_id)

    def _record(
        self, group_id: str, calls: Sequence[JudgeCall], fate: Fate, failed: Failed | None
    ) -> None:
        now = self._clock()
        bad_replies = sum(not call.ok for call in calls)
        with self._database.write() as session:
            save_judge_calls(session, group_id, calls, rubric_hash=self._rubric_hash, now=now)
            session.execute(
                update(GroupRow)
                .where(GroupRow.group_id == group_id)
                .values(attempts=GroupRow.attempts + bad_replies)
            )
            if failed is not None:
                if isinstance(fate, Unanswered):
                    count(session, "judge_calls", "unanswered")
                    count(session, "judge_failures", fate.reason)
                hold(session, group_id, until=now + LONGEST_RETRY_AFTER_S + self._lease_s)
                return
            changed = False
            if isinstance(fate, SetAside):
                changed = set_aside(session, group_id, fate.reason, detail=storable(fate.detail))
            elif isinstance(fate, Scored):
                changed = mark_scored(
                    session,
                    group_id,
                    fate.judgement.scores,
                    fate.judgement.explanations,
                    self._judge.model,
                    self._rubric_hash,
                    now,
                )
        _log_fate(group_id, fate, changed)

    def _record_probe(self, calls: Sequence[JudgeCall], fate: Fate) -> None:
        with self._database.write() as session:
            save_judge_calls(
                session, SUBJECT, calls, rubric_hash=self._rubric_hash, now=self._clock()
            )
            count(session, "judge_probes", "scored" if isinstance(fate, Scored) else fate.reason)

    def _charge(self, own_faults: Sequence[Failed]) -> None:
        with self._database.write() as session:
            ended = [charge(session, failed, now=self._clock()) for failed in own_faults]
        for failed, is_set_aside in zip(own_faults, ended, strict=True):
            event = "group_set_aside" if is_set_aside else "group_not_judged"
            log.warning(event, group_id=failed.group_id, reason=failed.reason, detail=failed.detail)

    def _give_back(self, group_ids: Sequence[str], until: float = 0.0) -> None:
        try:
            with self._database.write() as session:
                for group_id in group_ids:
                    give_back(session, group_id, until=until)
        except StoreError as error:
            log.warning("judging_leases_left", groups=len(group_ids), error=str(error))


_PASSING = (JudgeUnavailableError.reason, JudgeBusyError.reason)
"""Reasons of an outage that ends by itself."""


def _defect(group_id: str, error: Exception) -> Failed:
    said = storable(f"{type(error).__name__}: {error}")[:ERROR_CHARACTERS]
    return Failed(group_id=group_id, reason=DEFECT, detail=said)


def _log_fate(group_id: str, fate: Fate, changed: bool) -> None:
    if not changed:
        log.info("judgement_came_second", group_id=group_id)
    elif isinstance(fate, SetAside):
        log.warning("group_set_aside", group_id=group_id, reason=fate.reason, detail=fate.detail)
    elif isinstance(fate, Scored):
        scores = fate.judgement.scores
        log.info("group_scored", group_id=group_id, low=min(scores), high=max(scores))
