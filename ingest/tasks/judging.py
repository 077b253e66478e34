"""Have the judge rank the sessions of groups that wait for it.

The judge sees whole sessions, in two passes at least, with what is known of how each ended. It is
asked only while it works for the groups of answers beside (`ingest.judge_watch`), so a failure of
its own is a group's fault; after a few the group is set aside with the reason.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.errors import (
    JudgeRefusalError,
    JudgeReplyError,
    JudgeUnavailableError,
    JudgeWithheldError,
    UnreadableExchangesError,
)
from ingest.judge_watch import count_group, read_judge_state
from ingest.privacy.texts import JudgeView, NotRedactedError
from ingest.ruler.calls import count_call, save_judge_calls
from ingest.ruler.group import IDENTICAL, NOT_REDACTED, RUBBISH, UNREADABLE, refusal_of
from ingest.ruler.judge import Judge, replies_kept_for, storable
from ingest.ruler.judging import cost_of
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import SEED_BITS, JudgeCall
from ingest.store.groups import DETAIL_CHARACTERS
from ingest.store.listing import patiently
from ingest.tasks.grouping import SET_ASIDE, STAGE, WAITING, mark_scored, members_of
from ingest.trajectories.recorded import RecordedTrajectory, load_trajectory
from ingest.trajectories.records import TrajectoriesError
from ingest.trajectories.scoring import IdenticalError, merged_tools, score_trajectories
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, count
from sidecar.store.models import TaskGroupRow

LEAST_PASSES: Final = 2
"""The second pass shows the sessions in the reverse order, so places do not count."""
ATTEMPTS: Final = 5
"""Failures of a judge that works, after which a group is set aside."""
OLDEST: Final = 64
"""Waiting groups among which the next one is looked for."""
LONGEST_KEPT_S: Final = 3_600.0
"""As in `ingest.ruler.judging`: how long a judgement is kept for a store that refuses it."""

log = structlog.get_logger()


def mixed_rewards(outcomes: Sequence[float], scores: Sequence[float]) -> list[float]:
    """Return rewards in which outcomes decide, and the judge's score among equal outcomes. Pure.

    The score moves a reward by less than half of the smallest difference between outcomes, as
    `gate_then_rank` of verifiers keeps what failed below what passed. With success and failure
    these are 0.75..1 and 0..0.25; with equal outcomes the reward is the score.
    """
    gaps = [after - before for before, after in pairwise(sorted(set(outcomes)))]
    part = min(gaps) / (1.0 + min(gaps)) / 2.0 if gaps else 1.0
    return [
        outcome * (1.0 - part) + score * part if gaps else score
        for outcome, score in zip(outcomes, scores, strict=True)
    ]


def with_evidence(found: RecordedTrajectory) -> list[Mapping[str, Any]]:
    """Return the messages of a session, and a note of what is known of how it ended. Pure."""
    known = {name: value for name, value in found.outcome.items() if value not in (None, [])}
    if not known:
        return list(found.messages)
    words = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in known.items())
    return [*found.messages, {"role": "note", "content": f"known of how it ended: {words}"}]


class TaskJudging:
    """Ranks waiting groups one by one. For one event loop."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: JudgeSettings,
        *,
        view: JudgeView | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._judge = judge
        self._settings = settings
        self._view = view
        self._now = now
        self._until = 0.0
        """Until then the operator's limits withhold the judge."""

    async def step(self) -> bool:
        """Judge the oldest waiting group. Returns: True when one was scored or set aside. Raises:
        StoreError."""
        group_id = await asyncio.to_thread(self._next)
        if group_id is None:
            return False
        calls: list[JudgeCall] = []
        failure: tuple[str, str] | None = None
        scores: Sequence[float] = ()
        try:
            found = await asyncio.to_thread(self._load, group_id)
            settings = self._settings.of(found[0].project)
            with replies_kept_for(None):  # one kept reply would hold what many users said
                judgement = await score_trajectories(
                    self._judge,
                    [with_evidence(one) for one in found],
                    tools=merged_tools([one.tools for one in found]),
                    rubric=settings.rubric,
                    passes=max(LEAST_PASSES, settings.passes),
                    seed=secrets.randbits(SEED_BITS),
                    on_call=calls.append,
                    subject=group_id,
                    view=self._view,
                )
            scores = judgement.scores
        except JudgeWithheldError as error:
            self._until = error.until
            return False
        except (IdenticalError, TrajectoriesError, UnreadableExchangesError) as error:
            reason = IDENTICAL if isinstance(error, IdenticalError) else UNREADABLE
            failure = reason, str(error)
        except NotRedactedError as error:
            failure = NOT_REDACTED, str(error)
        except (JudgeUnavailableError, JudgeRefusalError) as error:
            failure = refusal_of(error), str(error)
        except JudgeReplyError as error:
            failure = RUBBISH, str(error)
        await patiently(
            lambda: self._record(group_id, calls, scores, failure),
            on_failure=lambda error, _: log.warning(
                "judgement_not_stored", group_id=group_id, error=str(error)
            ),
            longest_s=LONGEST_KEPT_S,
        )
        return True

    def _next(self) -> str | None:
        if self._now() < self._until:
            return None
        with self._database.read() as session:
            state = read_judge_state(session)
            if state is None or state.state != "works":
                return None
            row = TaskGroupRow
            waiting = select(row.judge_attempts, row.seq, row.group_id)
            oldest = waiting.where(row.status == WAITING).order_by(row.seq).limit(OLDEST)
            # What failed goes behind what has not been asked.
            found = min(session.execute(oldest), key=lambda one: one[:2], default=None)
            return None if found is None else found.group_id

    def _load(self, group_id: str) -> list[RecordedTrajectory]:
        """Raises: TrajectoriesError; UnreadableExchangesError."""
        with self._database.read() as session:
            return [
                load_trajectory(session, one.session_id, among=frozenset(one.exchange_ids or ()))
                for one in members_of(session, group_id)
            ]

    def _record(
        self,
        group_id: str,
        calls: Sequence[JudgeCall],
        scores: Sequence[float],
        failure: tuple[str, str] | None,
    ) -> None:
        now = self._now()
        with self._database.write() as session:
            group = session.scalar(select(TaskGroupRow).where(TaskGroupRow.group_id == group_id))
            if group is None or group.status != WAITING:  # forgotten meanwhile
                for call in calls:
                    count_call(session, call)
                return
            hashed = hash_of(self._settings.of(group.project))
            save_judge_calls(session, group_id, calls, rubric_hash=hashed, now=now)
            if failure is not None:
                _fail(session, group, *failure)
                return
            tokens, nano = cost_of(calls)
            count_group(session, tokens=tokens, nano_usd=nano)
            group.judge_model = calls[-1].judge_model if calls else self._judge.model
            group.rubric_hash = hashed
            members = members_of(session, group_id)
            outcomes = [one.reward for one in members if one.reward is not None]
            source: Literal["ruler", "mixed"] = "ruler"
            if len(outcomes) == len(members):
                source, scores = "mixed", mixed_rewards(outcomes, scores)
            mark_scored(session, group, members, scores, source, now=now)


def _fail(session: Session, group: TaskGroupRow, reason: str, detail: str) -> None:
    """Count a failure of a group. The judge works, so what it could not answer is the group's fault
    when it happens again and again."""
    group.judge_attempts += 1
    group.detail = storable(detail)[:DETAIL_CHARACTERS]
    passing = reason.startswith("judge_") and reason not in ("judge_refused", "judge_too_long")
    if not passing or group.judge_attempts >= ATTEMPTS:
        group.status, group.reason = SET_ASIDE, reason
        count(session, STAGE, reason)
    log.warning("task_group_not_judged", group_id=group.group_id, reason=reason)
