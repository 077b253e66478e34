"""The sampling worker: completes chosen groups with candidates from the adapter that answered.

Users come first: a candidate is requested only while a vLLM has capacity for it, and a candidate
that is held back is requested later. The first candidate of a round goes alone: what it is refused
for, the others would be too. The others go in steps, so that a group whose answers are all alike is
set aside before it is complete (`candidates.next_step`). One round of a group is stored in one
transaction: its answers, its tokens, the dropped candidates with reasons, and the group's next
status. The groups of a worker that died are sampled again when its lease has run out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil
from typing import TypeVar

import structlog
from sqlalchemy.orm import Session

from ingest.errors import EngineDownError, SamplingError
from ingest.grouping.request import LogprobsMode
from ingest.judge_watch import FIRST_QUESTION, why_sampling_holds
from ingest.privacy.screen import Screen, default_screen
from ingest.ruler.group import UNREADABLE
from ingest.ruler.judge import storable
from ingest.sampling.round import (
    OF_ALL,
    Attempt,
    Conclusion,
    Job,
    ask,
    load_job,
    next_step,
    read_sampled_today,
    spent_budget,
    store_round,
)
from ingest.store.groups import SAMPLING, claim_groups, release_group, set_aside
from ingest.store.listing import patiently
from ingest.vllm.sampler import CANDIDATE_S, Room, Sampler
from sidecar import conditions
from sidecar.backoff import Backoff
from sidecar.errors import StoreError
from sidecar.settings import Groups, SamplingField
from sidecar.store.database import DAMAGE, Database, count

POLL_S = 0.5
"""How long an idle worker waits before it polls again."""
PAUSES = Backoff(first_s=POLL_S, last_s=5.0)
"""Pauses while vLLM or the store is unreachable: the first equals the poll, then they double."""
AHEAD = 3
"""Claimed groups, as a multiple of those whose candidates fill the slots. Measured with answers of
one second each: 2.1 groups a second, as when all candidates of a group went at once; 1.8 with 2."""
LEASE_S = 6 * CANDIDATE_S + 60.0
"""A round asks in three or four steps, and each may wait for others' candidates."""
WAITING = "sampling_waits"
"""Counter rows: (stage, why) -> how often sampling began to wait."""
NO_ROOM_S = 600.0
"""How long users may leave no room before the store says so: shorter pauses are how it works."""
EARLIER, ENGINE_DOWN, LOAD_UNKNOWN = "earlier", "engine_down", "load_unknown"
NO_ROOM = "no_room"
"""Why sampling waits: an earlier process may have said something; no vLLM is reachable; none tells
its load; users left no room for long. Else why there is no judge, or the setting of a budget that
is spent."""

Result = TypeVar("Result")

log = structlog.get_logger()


class SamplingWorker:
    """Claims groups in status `sampling` and completes them. One per event loop.

    The budgets are checked before a group is begun, and a begun group is finished: so at most
    `AHEAD * concurrency + size` answers are sampled beyond a budget. None is begun while the judge
    rejects every question, or while it is away and enough complete groups wait for it already.
    """

    def __init__(
        self,
        database: Database,
        sampler: Sampler,
        room: Room,
        settings: Groups,
        *,
        model: str,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        sampling_defaults: Mapping[SamplingField, float] | None = None,
        now: Callable[[], float] = time.time,
        screen: Screen | None = None,
    ) -> None:
        """room: tells when to begin; `sampler` itself raises NoRoomError when users came meanwhile.
        screen: the privacy policies that candidates must pass; None: the default one."""
        self._database = database
        self._sampler = sampler
        self._room = room
        self._settings = settings
        self._model = model
        self._mode = logprobs_mode
        self._defaults = sampling_defaults
        self._screen = screen or default_screen()
        self._now = now
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._working: set[str] = set()
        self._failures = 0
        """Consecutive failures of vLLM or the store; they set the pause."""
        self._quiet_until = 0.0
        """Unix seconds until which vLLM asked to be left alone."""
        self._closed_since: float | None = None
        """Unix seconds since which users have left no room; None: they leave some."""
        self._told: tuple[str, float | None] | None = (EARLIER, None)
        """Why sampling waits as the store says it, and until when; None: it says nothing."""

    async def run(self, stop: asyncio.Event) -> None:
        """Complete groups until `stop` is set; then give back those in progress."""
        tasks: set[asyncio.Task[bool]] = set()
        try:
            while not stop.is_set():
                tasks |= {asyncio.create_task(self._complete(name)) for name in await self._take()}
                tasks -= await self._wait(tasks, stop)
        finally:
            under_way = frozenset(self._working)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._give_back, under_way)

    async def step(self) -> int:
        """Claim groups and run one round of each.

        Returns: the number of groups that went on to the judge.
        """
        names = await self._take()
        return sum(await asyncio.gather(*(self._complete(name) for name in names)))

    async def _take(self) -> list[str]:
        """Claim as many groups as keep every slot busy; none without capacity or budget.

        Each begins with a single candidate, so more are claimed than fill the slots (`AHEAD`).
        """
        groups = ceil(AHEAD * self._settings.concurrency / (self._settings.size - 1))
        groups -= len(self._working)
        if groups <= 0 or self._now() < self._quiet_until:
            return []
        try:
            is_open = await self._is_open()
            names = await asyncio.to_thread(self._claim, groups) if is_open else []
        except StoreError as error:
            self._fail(error)
            return []
        if is_open and not names:
            self._failures = 0
        self._working.update(names)
        return names

    async def _is_open(self) -> bool:
        """Return True when vLLM has room; say in the store when that is not known, or is again.

        Raises: StoreError.
        """
        try:
            is_open = await self._room.is_open()
        except SamplingError as error:
            self._fail(error)
            reason = ENGINE_DOWN if isinstance(error, EngineDownError) else LOAD_UNKNOWN
            why = f"the load of vLLM is not known: {storable(str(error))}"
            await self._write(lambda session: self._say_waiting(session, reason, why))
            return False
        # Users who come first are no trouble. A spent budget ends where groups are claimed.
        blind = self._told is not None and self._told[0] in (EARLIER, ENGINE_DOWN, LOAD_UNKNOWN)
        if blind and not is_open:
            await self._write(self._say_going)
        if is_open or self._closed_since is None:
            self._closed_since = None if is_open else self._now()
        elif self._told is None and self._now() - self._closed_since >= NO_ROOM_S:
            await self._write(self._say_no_room)
        return is_open

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        log.warning("sampling_waits", error=str(error), pause_s=_pause_s(self._failures))

    def _claim(self, limit: int) -> list[str]:
        now = self._now()
        with self._database.write(alone=False) as session:
            spent = spent_budget(read_sampled_today(session, now=now), self._settings, now=now)
            if spent is not None:
                until = spent.until.timestamp()
                self._say_waiting(session, spent.setting, spent.why, until=until)
                return []
            if (hold := why_sampling_holds(session)) is not None:
                reason, why = hold
                if reason != FIRST_QUESTION:  # which is answered in seconds, and is no trouble
                    self._say_waiting(session, reason, storable(why))
                return []
            self._say_going(session)
            names = claim_groups(session, SAMPLING, limit=limit, now=now, lease_s=LEASE_S)
        return [name for name in names if name not in self._working]

    async def _complete(self, group_id: str) -> bool:
        """Run one round of one group. Returns: True when it went on to the judge."""
        try:
            try:
                job = await self._patiently(lambda: self._load(group_id))
            except DAMAGE as error:
                why = f"{type(error).__name__}: {error}"
                log.error("group_unreadable", group_id=group_id, why=why)
                await self._patiently(lambda: self._set_aside(group_id, why))
                return False
            if job is None:
                log.error("group_without_exchange", group_id=group_id)
                return False
            attempts = await self._round(job)
            down = any(attempt.miss == "engine_down" for attempt in attempts)
            self._failures = self._failures + 1 if down else 0
            busy_s = max((one.wait_s for one in attempts if one.miss == "engine_busy"), default=0.0)
            self._quiet_until = max(self._quiet_until, self._now() + busy_s)
            conclusion = await self._patiently(lambda: self._store(job, attempts))
        finally:
            self._working.discard(group_id)
        log.info(
            "group_round",
            group_id=group_id,
            adapter=job.group.adapter,
            action=conclusion.action,
            reason=conclusion.reason,
            tokens=sum(attempt.tokens for attempt in attempts),
        )
        return conclusion.action == "sampled"

    async def _round(self, job: Job) -> list[Attempt]:
        """Request the missing candidates in steps: one, and then others while they are of use."""
        attempts: list[Attempt] = []
        step = min(1, next_step(job.group.answers, size=self._settings.size, missing=job.missing))
        while step:
            attempts += await asyncio.gather(*(self._candidate(job) for _ in range(step)))
            if any(attempt.miss in OF_ALL for attempt in attempts):
                break
            sampled = (attempt.answer for attempt in attempts if attempt.answer is not None)
            step = next_step(
                [*job.group.answers, *sampled],
                size=self._settings.size,
                missing=job.missing - len(attempts),
            )
        return attempts

    async def _candidate(self, job: Job) -> Attempt:
        async with self._slots:
            return await ask(self._sampler, job, self._screen, now=self._now())

    def _load(self, group_id: str) -> Job | None:
        with self._database.read() as session:
            return load_job(
                session,
                group_id,
                model=self._model,
                mode=self._mode,
                size=self._settings.size,
                sampling_defaults=self._defaults,
            )

    def _set_aside(self, group_id: str, why: str) -> bool:
        with self._database.write(alone=False) as session:
            return set_aside(session, group_id, UNREADABLE, detail=storable(why))

    def _store(self, job: Job, attempts: Sequence[Attempt]) -> Conclusion:
        with self._database.write(alone=False) as session:
            return store_round(session, job, attempts, size=self._settings.size, now=self._now())

    def _give_back(self, names: Collection[str]) -> None:
        try:
            with self._database.write(alone=False) as session:
                for group_id in sorted(names):
                    release_group(session, group_id)
        except StoreError as error:
            log.warning("leases_kept", groups=len(names), error=str(error))

    async def _patiently(self, work: Callable[[], Result]) -> Result:
        """Keep sampled answers, which have cost tokens, until they are stored."""
        return await patiently(
            work,
            on_failure=lambda error, pause_s: log.warning(
                "store_away", error=str(error), pause_s=pause_s
            ),
        )

    async def _wait(
        self, tasks: Collection[asyncio.Task[bool]], stop: asyncio.Event
    ) -> set[asyncio.Task[bool]]:
        """Wait until a group is done, a pause ends, or `stop` is set. Returns: the done tasks."""
        stopping = asyncio.create_task(stop.wait())
        # After a failure the whole pause is waited: groups that fail at once must not spin.
        watched = {stopping} if self._failures else {stopping, *tasks}
        await asyncio.wait(
            watched, timeout=_pause_s(self._failures), return_when=asyncio.FIRST_COMPLETED
        )
        stopping.cancel()
        done = {task for task in tasks if task.done()}
        for task in done:
            task.result()  # re-raises an unexpected error
        return done

    async def _write(self, say: Callable[[Session], None]) -> None:
        def work() -> None:
            with self._database.write(alone=False) as session:
                say(session)

        await asyncio.to_thread(work)

    def _say_no_room(self, session: Session) -> None:
        # A lease of 0 s claims nothing: it tells whether a group waits.
        if claim_groups(session, SAMPLING, limit=1, now=self._now(), lease_s=0.0):
            self._say_waiting(
                session,
                NO_ROOM,
                f"users have left no room for candidates in {NO_ROOM_S / 60:.0f} min; raise "
                "groups.max_slowdown, or give candidates a vLLM of their own "
                "(groups.sampling_upstreams)",
            )

    def _say_waiting(
        self, session: Session, reason: str, why: str, *, until: float | None = None
    ) -> None:
        """Write why no candidates are sampled, and count it, once for each reason and end.

        until: Unix seconds at which it ends by itself; None: not known.
        """
        if self._told == (reason, until):
            return
        now = self._now()
        log.warning("sampling_stopped", reason=reason, why=why, until=until)
        count(session, WAITING, reason)
        spent = reason.startswith("groups.")
        found = conditions.Condition(
            kind="sampling",
            state="look",
            code="budget_spent" if spent else reason,
            message=f"no candidates are sampled: {why[: conditions.MOST_CHARACTERS]}",
            to_do=f"wait, or raise {reason} and restart score" if spent else "",
            since=now,
            until=until,
        )
        conditions.write(session, found, now=now)
        self._told = reason, until

    def _say_going(self, session: Session) -> None:
        if self._told is not None:
            conditions.clear(session, "sampling")
            self._told = None


def _pause_s(failures: int) -> float:
    """Return the pause after this many failures, in seconds: 0.5, 1, 2, 4, 5, 5, ..."""
    return PAUSES.wait_s(failures + 1)
