"""The sampling worker: completes chosen groups with candidates from the adapter that answered.

Users come first: a candidate is sent only while vLLM has room for it, and what is held back is
taken up later. One round of a group is stored in one transaction: its answers, its tokens, what was
dropped and why, and the group's next status. What a dead worker was sampling is sampled again when
its lease has run out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil
from typing import TypeVar

import structlog

from ingest.errors import SamplingError
from ingest.grouping.exchangeable import LogprobsMode
from ingest.ruler.group import UNREADABLE
from ingest.ruler.judge_errors import storable
from ingest.sampling.budget import day_of, next_midnight, tokens_spent
from ingest.sampling.candidates import Attempt, Conclusion
from ingest.sampling.round import Job, ask, load_job, store_round
from ingest.store.groups import SAMPLING, claim_groups, release_group, set_aside
from ingest.vllm.sampler import LoadProbe, Sampler
from ingest.vllm.throttle import PROBE_INTERVAL_S, Throttle
from sidecar.backoff import Backoff
from sidecar.errors import StoreError
from sidecar.settings import Groups, SamplingField
from sidecar.store.database import DAMAGE, Database

POLL_S = 0.5
"""How long a worker with nothing to do waits before it looks again."""
PAUSES = Backoff(first_s=POLL_S, last_s=5.0)
"""The first one is the ordinary poll; each failure in a row doubles it."""
"""The longest pause while vLLM or the store is away; it starts at POLL_S and doubles."""
LEASE_SLACK_S = 60.0

Result = TypeVar("Result")

log = structlog.get_logger()


class SamplingWorker:
    """Claims groups in sampling and completes them. One per event loop; `run` until told to stop.

    The day's allowance is looked at before a group is begun, and a begun group is finished: at most
    `concurrency + size` answers are sampled beyond it.
    """

    def __init__(
        self,
        database: Database,
        sampler: Sampler,
        load_probe: LoadProbe,
        settings: Groups,
        *,
        model: str,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        sampling_defaults: Mapping[SamplingField, float] | None = None,
        now: Callable[[], float] = time.time,
        probe_interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self._database = database
        self._sampler = sampler
        self._settings = settings
        self._model = model
        self._mode = logprobs_mode
        self._defaults = sampling_defaults
        self._now = now
        self._throttle = Throttle(
            load_probe, settings.max_running_requests, interval_s=probe_interval_s
        )
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._working: set[str] = set()
        self._failures = 0
        """In a row, of vLLM or the store as a whole; sets the pause."""
        self._day_said = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Complete groups until `stop` is set; then give back those that are under way."""
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
        """One round: take what may be taken now and see it through.

        Returns: how many groups went on to the judge.
        """
        names = await self._take()
        return sum(await asyncio.gather(*(self._complete(name) for name in names)))

    async def _take(self) -> list[str]:
        """Claim as many groups as keep every slot busy; none while something speaks against it."""
        wanted = self._settings.size - 1
        groups = ceil(self._settings.concurrency / wanted) - len(self._working)
        if groups <= 0:
            return []
        try:
            if not await self._throttle.is_open():
                return []
            names = await asyncio.to_thread(self._claim, groups)
        except (SamplingError, StoreError) as error:
            self._failures += 1
            log.warning("sampling_waits", error=str(error), pause_s=_pause_s(self._failures))
            return []
        if not names:
            self._failures = 0
        self._working.update(names)
        return names

    def _claim(self, limit: int) -> list[str]:
        now = self._now()
        with self._database.write() as session:
            spent = tokens_spent(session, now=now)
            if spent >= self._settings.tokens_per_day:
                self._say_spent(spent, now)
                return []
            lease_s = 2 * self._settings.timeout_s + LEASE_SLACK_S
            names = claim_groups(session, SAMPLING, limit=limit, now=now, lease_s=lease_s)
        return [name for name in names if name not in self._working]

    async def _complete(self, group_id: str) -> bool:
        """One round of one group. Returns: whether it went on to the judge."""
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
            attempts = await asyncio.gather(*(self._candidate(job) for _ in range(job.missing)))
            down = any(attempt.miss == "engine_down" for attempt in attempts)
            self._failures = self._failures + 1 if down else 0
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

    async def _candidate(self, job: Job) -> Attempt:
        async with self._slots:
            try:
                if not await self._throttle.is_open():
                    return Attempt(miss="held_back")
            except SamplingError:  # said by `_take`, which measures as often
                return Attempt(miss="engine_down")
            with self._throttle.sending():
                return await ask(self._sampler, job)

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
        with self._database.write() as session:
            return set_aside(session, group_id, UNREADABLE, detail=storable(why))

    def _store(self, job: Job, attempts: Sequence[Attempt]) -> Conclusion:
        with self._database.write() as session:
            return store_round(session, job, attempts, size=self._settings.size, now=self._now())

    def _give_back(self, names: Collection[str]) -> None:
        try:
            with self._database.write() as session:
                for group_id in names:
                    release_group(session, group_id)
        except StoreError as error:
            log.warning("leases_kept", groups=len(names), error=str(error))

    async def _patiently(self, work: Callable[[], Result]) -> Result:
        """Do something with the store in a thread, again and again while the store is away.

        What was sampled is paid for: it is held on to until it is stored.
        """
        failures = 0
        while True:
            try:
                return await asyncio.to_thread(work)
            except StoreError as error:
                failures += 1
                pause_s = _pause_s(failures)
                log.warning("store_away", error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)

    async def _wait(
        self, tasks: Collection[asyncio.Task[bool]], stop: asyncio.Event
    ) -> set[asyncio.Task[bool]]:
        """Until a group is done, a pause is over, or it is time to stop. Returns: what is done."""
        stopping = asyncio.create_task(stop.wait())
        # After a failure the pause is a pause: groups that come back at once must not spin.
        watched = {stopping} if self._failures else {stopping, *tasks}
        await asyncio.wait(
            watched, timeout=_pause_s(self._failures), return_when=asyncio.FIRST_COMPLETED
        )
        stopping.cancel()
        done = {task for task in tasks if task.done()}
        for task in done:
            task.result()  # a bug must not go by in silence
        return done

    def _say_spent(self, spent: int, now: float) -> None:
        if self._day_said == day_of(now):
            return
        self._day_said = day_of(now)
        until = next_midnight(now).isoformat()
        log.warning("sampling_budget_spent", tokens=spent, waits_until=until)


def _pause_s(failures: int) -> float:
    """0.5, 1, 2, 4, 5, 5, ... seconds."""
    return PAUSES.wait_s(failures + 1)
