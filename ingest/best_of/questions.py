"""Judge answers while a user waits: the scoring process's side of best of N.

Each question is one task and uses the same code as every other judgement: RULER, one pass. The
verdict is returned first, and the store is written after that. A judgement that has begun is
completed even when the asking proxy disconnects: its scores serve training all the same. While the
judge is down, questions are declined at once, so that users do not wait.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from sqlalchemy.orm import Session

from ingest.best_of.groups import answers_digest, settle
from ingest.best_of.store import (
    STAGE,
    BestOfScores,
    any_scores,
    oldest_scores,
    remove_scores,
    save_scores,
)
from ingest.errors import (
    JudgeGarbledError,
    JudgeLimitedError,
    JudgeRejectedError,
    JudgeSpentError,
    UnreadableExchangesError,
)
from ingest.grouping.rules import live_now, rules_now, rules_of
from ingest.grouping.selection import group_id_of
from ingest.privacy.judge_view import JudgeView
from ingest.records import Answer, Group
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.group import (
    REFUSED,
    TOO_LONG,
    GroupOutcome,
    Scored,
    SetAside,
    Unanswered,
    judge_group,
)
from ingest.ruler.judge import Judge
from ingest.ruler.material import read_material
from ingest.ruler.outage import Outage
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import SEED_BITS, JudgeCall
from ingest.store.exchanges import NEW, StoredExchange, load_exchange
from ingest.store.patience import patiently
from sidecar.errors import StoreError
from sidecar.scoring.wire import Material, NoPick, Pick, Verdict
from sidecar.settings import Settings
from sidecar.store.database import Database, count

EXPIRE_S = 86_400.0
"""Age after which scores without an exchange (its capture was lost) are given up."""
SWEEP_S = 60.0
SWEEP_LIMIT = 500
LONGEST_KEPT_S = 600.0
"""Longest time that scores are kept for a store that refuses them."""
MOST_KEPT = 64
"""Questions whose scores wait for the store; more are given up at once, since each holds a request
in memory."""
STOP_GRACE_S = 15.0
"""Longest time that a stop waits for the store; as `ingest.ruler.judging.STOP_GRACE_S`."""
NEVER_CAME = "exchange_never_came"
NOT_KEPT = "not_kept"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One question with its outcome and judge calls."""

    material: Material
    group: Group
    outcome: GroupOutcome
    calls: tuple[JudgeCall, ...]


class BestOfJudge:
    """Judges questions and keeps the scores. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        self._database = database
        self._judge = judge
        # One pass only: passes are sequential calls, and a user is waiting.
        self._settings = settings.judge.model_copy(update={"passes": 1})
        self._concurrency = settings.best_of.concurrency
        self._rules = rules_of(settings)
        self._view = JudgeView(settings.privacy)
        self._model = settings.serving.model
        self._clock = clock
        self._draw_seed = draw_seed
        self._outage = Outage()
        self._spent_until = 0.0
        """A budget of the judge is spent until then, in Unix seconds."""
        self._judging: set[asyncio.Task[Verdict]] = set()
        self._keeping: set[asyncio.Task[None]] = set()

    async def decide(self, material: Material) -> Verdict:
        """Return the best answer, or the reason why there is none.

        Cancelling the caller does not stop the judgement.
        """
        if len(self._judging) >= self._concurrency:
            return NoPick(reason="busy")
        if self._outage.lasts and self._clock() < self._outage.retry_at:
            return NoPick(reason="judge_down")
        if self._clock() < self._spent_until:
            return NoPick(reason=JudgeSpentError.reason)
        task = asyncio.create_task(self._judge_now(material))
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Wait until every question in progress is judged and stored."""
        while self._judging or self._keeping:
            await asyncio.wait({*self._judging, *self._keeping})

    async def aclose(self) -> None:
        """Cancel the judgements in progress, and store those that have ended."""
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)
        if not self._keeping:
            return
        _, late = await asyncio.wait(self._keeping, timeout=STOP_GRACE_S)
        for waiting in late:
            waiting.cancel()
        if late:
            log.warning("best_of_scores_lost", questions=len(late), error="the process stops")

    async def sweep(self) -> None:
        """Settle scores that were left over, or give them up; see `EXPIRE_S`."""
        try:
            await asyncio.to_thread(self._sweep)
        except StoreError as error:
            log.warning("best_of_sweep_failed", error=str(error))

    async def _judge_now(self, material: Material) -> Verdict:
        group = _as_group(material)
        calls: list[JudgeCall] = []
        try:
            outcome = await judge_group(
                group,
                self._judge,
                self._settings.of(group.project),
                seed=self._draw_seed(),
                on_call=calls.append,
                view=self._view,
            )
        except StoreError as error:  # a budget is set, and nobody can know what is spent
            log.warning("best_of_not_judged", error=str(error))
            return NoPick(reason="failed")
        self._note_outage(outcome)
        judged = Judged(material=material, group=group, outcome=outcome, calls=tuple(calls))
        keeping = asyncio.create_task(self._keep(judged))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        return _verdict(outcome)

    def _note_outage(self, outcome: GroupOutcome) -> None:
        if isinstance(outcome, Unanswered):
            if outcome.reason == JudgeSpentError.reason:
                self._spent_until = outcome.until or 0.0
            if outcome.until is not None or _why_unanswered(outcome) == REFUSED:
                return  # our own limits, or this question only: the judge is not down
            if self._outage.unanswered(self._clock(), retry_after_s=outcome.retry_after_s):
                log.warning("best_of_judge_down", model=self._judge.model, error=outcome.detail)
        elif isinstance(outcome, Scored) or outcome.asked:
            lasted_s = self._outage.answered(self._clock())
            if lasted_s is not None:
                log.warning("best_of_judge_up", lasted_s=round(lasted_s, 1))

    async def _keep(self, judged: Judged) -> None:
        exchange_id = judged.material.exchange_id
        many = len(self._keeping) > MOST_KEPT
        try:
            await patiently(
                lambda: self._store(judged),
                on_failure=lambda error, pause_s: log.warning(
                    "best_of_scores_wait",
                    exchange_id=exchange_id,
                    error=str(error),
                    again_s=pause_s,
                ),
                longest_s=0.0 if many else LONGEST_KEPT_S,
            )
        except StoreError as error:
            # The user has the answer; the exchange is selected and judged like any other.
            log.warning("best_of_scores_lost", exchange_id=exchange_id, error=str(error))

    def _store(self, judged: Judged) -> None:
        now, outcome, keep = self._clock(), judged.outcome, judged.material.keep
        with self._database.write() as session:
            if keep:
                save_judge_calls(
                    session,
                    judged.group.group_id,
                    judged.calls,
                    rubric_hash=self._hash_of(judged.group),
                    now=now,
                )
            else:  # the calls quote the answers, so they are stored only with an exchange
                for call in judged.calls:
                    count(session, "judge_calls", "good" if call.ok else "bad")
            if isinstance(outcome, Unanswered):
                count(session, "judge_calls", "unanswered")
                count(session, "judge_failures", outcome.reason)
                count(session, STAGE, _why_unanswered(outcome))
            elif isinstance(outcome, SetAside):
                count(session, STAGE, outcome.reason)
            elif not keep:
                count(session, STAGE, NOT_KEPT)
            else:
                scores = self._scores(judged.group, outcome, now)
                save_scores(session, scores)
                stored = self._exchange(session, scores.exchange_id)
                if stored is not None and stored.selection != NEW:  # selection has decided it
                    live = live_now(session, self._model, self._rules)
                    settle(
                        session, stored, scores, rules_now(session, self._rules), live=live, now=now
                    )

    def _scores(self, group: Group, outcome: Scored, now: float) -> BestOfScores:
        return BestOfScores(
            exchange_id=group.exchange_id,
            at=now,
            answers_digest=answers_digest(read_material(group).answers),
            scores=outcome.judgement.scores,
            explanations=outcome.judgement.explanations,
            judge_model=outcome.judgement.judge_model or self._judge.model,
            rubric_hash=self._hash_of(group),
        )

    def _hash_of(self, group: Group) -> str:
        return hash_of(self._settings.of(group.project))

    def _exchange(self, session: Session, exchange_id: str) -> StoredExchange | None:
        """Load an exchange; None also when it is damaged: its scores then make no group."""
        try:
            return load_exchange(session, exchange_id)
        except UnreadableExchangesError as error:
            log.error("exchange_unreadable", exchange_id=exchange_id, why=str(error))
            return None

    def _sweep(self) -> None:
        now = self._clock()
        with self._database.read() as session:
            if not any_scores(session):
                return  # nearly always: take no write lock
        with self._database.write() as session:
            live = live_now(session, self._model, self._rules)
            for scores in oldest_scores(session, limit=SWEEP_LIMIT):
                stored = self._exchange(session, scores.exchange_id)
                if stored is not None and stored.selection != NEW:
                    settle(
                        session, stored, scores, rules_now(session, self._rules), live=live, now=now
                    )
                elif stored is None and scores.at < now - EXPIRE_S:
                    remove_scores(session, scores.exchange_id)
                    count(session, STAGE, NEVER_CAME)


def _as_group(material: Material) -> Group:
    """Convert a question to a group record; its ids and adapter come with the exchange."""
    return Group(
        group_id=group_id_of(material.exchange_id),
        exchange_id=material.exchange_id,
        session_key="",
        project=material.project,
        adapter="",
        request=material.request,
        prompt_token_ids=(),
        answers=tuple(
            Answer(index=index, origin="served", message=message)
            for index, message in enumerate(material.answers)
        ),
    )


def _why_unanswered(outcome: Unanswered) -> str:
    """Return the reason for the user: the judge is down or withheld, or refuses this question."""
    if outcome.reason == JudgeSpentError.reason:
        return outcome.reason
    if outcome.reason == JudgeLimitedError.reason:
        return "busy"
    refused = (JudgeRejectedError.reason, JudgeGarbledError.reason)
    return REFUSED if outcome.reason in refused else "judge_down"


def _verdict(outcome: GroupOutcome) -> Verdict:
    if isinstance(outcome, Unanswered):
        return NoPick(reason=_why_unanswered(outcome))
    if isinstance(outcome, SetAside):
        return NoPick(reason=REFUSED if outcome.reason == TOO_LONG else outcome.reason)
    scores = outcome.judgement.scores
    # Among equal scores the first answer wins: without best of N the user would get it too.
    return Pick(index=scores.index(max(scores)), scores=scores)
