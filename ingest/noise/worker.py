"""Scores chosen groups a second time, one at a time, while the judge has nothing else to do.

Fresh groups come first, and nothing is asked while the judge is away. A second scoring changes no
score: a failure costs a measurement alone, so it is not blamed on anybody and stops nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from ingest.noise.queue import Claim, Queue
from ingest.noise.rubrics import each_series
from ingest.privacy.judge_view import JudgeView
from ingest.ruler.group import GroupOutcome, Scored, SetAside, Unanswered, judge_group
from ingest.ruler.judge import Judge
from ingest.ruler.outage import Outage
from ingest.ruler.ruler import ATTEMPTS, SEED_BITS, JudgeCall
from ingest.store.patience import patiently
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database

POLL_S = 5.0
LEASE_SLACK_S = 60.0
LONGEST_KEPT_S = 60.0
"""Longest time that second scores are kept for a store that refuses them."""
DEFECT = "judge_defect"

log = structlog.get_logger()


class RescoringWorker:
    """Scores groups again until stopped. Several may run, in one process or in many."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: JudgeSettings,
        *,
        clock: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
        view: JudgeView | None = None,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """draw_seed: called for each group: the order is drawn anew, independently of the first.
        view: as for `score_answers`. announce: tells the operator's terminal."""
        self._judge = judge
        self._settings = settings
        self._clock = clock
        self._draw_seed = draw_seed
        self._view = view
        self._announce = announce
        self._outage = Outage()
        self._series = each_series(settings, model=judge.model)
        self._queue = Queue(
            database,
            self._series,
            after_s=settings.rescore_after_s,
            lease_s=settings.passes * ATTEMPTS * settings.timeout_s + LEASE_SLACK_S,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Score groups again, one at a time, until `stop` is set."""
        stopping = asyncio.create_task(stop.wait())
        begun = False
        try:
            while not stop.is_set():
                scored = False
                try:
                    if not begun:
                        await asyncio.to_thread(self.begin)
                        begun = True
                    scored = await self.step(stopping)
                except StoreError as error:
                    log.warning("rescoring_waits_for_store", error=str(error))
                if not scored:
                    await asyncio.wait({stopping}, timeout=POLL_S)
        finally:
            stopping.cancel()

    def begin(self) -> None:
        """Write what is known of this judge: the one before may have been another. Blocks.

        Raises: StoreError.
        """
        self._queue.begin(self._clock())

    async def step(self, stopping: asyncio.Task[bool] | None = None) -> bool:
        """Score the group again that waits longest, if one does and the judge has time.

        stopping: ends the question to the judge; the group is put back.
        Returns: True when another may follow at once. Raises: StoreError.
        """
        if self._clock() < self._outage.retry_at:
            return False
        claim = await asyncio.to_thread(self._queue.claim, self._clock())
        if claim is None:
            return False
        calls: list[JudgeCall] = []
        asking = asyncio.create_task(self._ask(claim, calls))
        await asyncio.wait(
            {asking, *((stopping,) if stopping is not None else ())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.to_thread(self._queue.put_back, claim, now=self._clock())
            return False
        await self._keep(claim, asking.result(), calls)
        return isinstance(asking.result(), Scored)

    async def _ask(self, claim: Claim, calls: list[JudgeCall]) -> GroupOutcome:
        try:
            return await judge_group(
                claim.group,
                self._judge,
                # By the rubric of the first scores, also where the project has another by now.
                self._settings.of(self._series[claim.series]),
                seed=self._draw_seed(),
                on_call=calls.append,
                view=self._view,
            )
        except Exception as error:
            log.exception("rescoring_failed", group_id=claim.group.group_id)
            return SetAside(reason=DEFECT, detail=type(error).__name__, asked=False)

    async def _keep(self, claim: Claim, outcome: GroupOutcome, calls: list[JudgeCall]) -> None:
        """Store what the judge said. Raises: StoreError when the store does not take it."""
        now = self._clock()
        if isinstance(outcome, Scored):
            self._outage.answered(now)
            state, news = await patiently(
                lambda: self._queue.record(claim, outcome.judgement, calls, now=now),
                on_failure=_not_stored,
                longest_s=LONGEST_KEPT_S,
            )
            if news:
                log.error(
                    "judge_drift",
                    model=state.judge_model,
                    rubric_hash=state.rubric_hash,
                    project=state.project,
                    what=state.drift,
                )
                of = f" --project {state.project}" if state.project else ""
                self._announce(
                    f"judge {state.judge_model} is not as it was: {state.drift}; "
                    f"see `sidecar judge noise{of}`"
                )
            return
        if isinstance(outcome, Unanswered):
            self._outage.unanswered(now, retry_after_s=outcome.retry_after_s)
        log.info("group_not_scored_again", group_id=claim.group.group_id, reason=outcome.reason)
        await patiently(
            lambda: self._queue.give_back(
                claim, calls, outcome.reason, final=isinstance(outcome, SetAside), now=now
            ),
            on_failure=_not_stored,
            longest_s=LONGEST_KEPT_S,
        )


def _not_stored(error: StoreError, _: float) -> None:
    log.warning("rescoring_not_stored", error=str(error))
