"""The groups that wait to be scored again, in the store. Blocking: the worker calls it in a thread.

A row waits with `window_number` null. A group that will not be scored again, for whatever reason,
has its row deleted and is counted; its scores are not touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Select, delete, select, update
from sqlalchemy.orm import Session

from ingest.judge_watch.state import read_judge_state
from ingest.noise.choosing import STAGE
from ingest.noise.estimate import Twice, usable
from ingest.noise.passes import Passes, decode_passes, encode_passes
from ingest.noise.rubrics import known_noise
from ingest.noise.state import NoiseState, read_noise_state, write_noise_state
from ingest.noise.windows import Series, refresh, window_for
from ingest.records import Group
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.ruler import JudgeCall, Judgement
from ingest.store.groups import SAMPLED, load_group
from sidecar.store.database import Database, count
from sidecar.store.models import GroupRow, RescoringRow

ATTEMPTS = 10
"""Claims of one group. With an hour between two of them it outlasts an outage of a night."""
AGAIN_S = 3_600.0
LATE_S = 7 * 86_400.0
"""A group that could not be asked about for so long, since fresh ones always came first, is left:
what is compared should not be weeks apart."""
GONE, OTHER_JUDGE, OTHER_ANSWERS = "group_gone", "other_judge", "other_answers"
UNREADABLE, TOO_LATE, INTERRUPTED = "unreadable", "too_late", "judge_interrupted"
SCORED = "scored"
MOST_LEFT = 50
"""Groups that one claim may pass over."""
_DAMAGE = (ValueError, TypeError, LookupError, zlib.error)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A group that is to be scored again now."""

    group: Group
    first: Passes
    series: Series


class Queue:
    """The groups of one judge that wait, and what is made of their second scores."""

    def __init__(
        self,
        database: Database,
        series: Mapping[Series, str],
        *,
        after_s: float,
        lease_s: float,
    ) -> None:
        """series: of the judge that scores now, as `each_series` returns them.
        after_s: `judge.rescore_after_s`. lease_s: how long a claimed group is this worker's."""
        self._database = database
        self._series = series
        self._after_s = after_s
        self._lease_s = lease_s

    def begin(self, now: float) -> None:
        """Write what is known of these series, as the state of the judge's noise."""
        with self._database.write() as session:
            write_noise_state(session, known_noise(session, self._series, now=now))

    def claim(self, now: float) -> Claim | None:
        """Claim the group that waits longest, when the judge works and no fresh group waits.

        Returns: None when there is none. Groups that are left for good are passed over.
        """
        for _ in range(MOST_LEFT):
            with self._database.read() as session:
                if not _has_time(session, now) or session.scalar(_due(now)) is None:
                    return None
            with self._database.write(alone=False) as session:
                row = session.scalar(_due(now).with_for_update(skip_locked=True))
                if row is None:
                    return None
                row.due_at = now + self._lease_s
                row.attempts += 1
                group_id, stored, held = row.group_id, row.first, _series_of(row)
                why = self._why_left(session, row, now)
                session.flush()
                if why is not None:
                    _leave(session, group_id, why)
                    continue
            claim = self._load(group_id, stored, held)
            if claim is not None:
                return claim
        return None

    def _load(self, group_id: str, stored: object, series: Series) -> Claim | None:
        try:
            with self._database.read() as session:
                group = load_group(session, group_id)
            if group is not None:
                return Claim(group=group, first=decode_passes(stored), series=series)
            why = GONE
        except _DAMAGE as error:
            log.warning("rescoring_unreadable", group_id=group_id, error=str(error))
            why = UNREADABLE
        with self._database.write(alone=False) as session:
            _leave(session, group_id, why)
        return None

    def _why_left(self, session: Session, row: RescoringRow, now: float) -> str | None:
        if _series_of(row) not in self._series:
            return OTHER_JUDGE
        if session.scalar(select(GroupRow.seq).where(GroupRow.group_id == row.group_id)) is None:
            return GONE
        if row.attempts > ATTEMPTS:
            return INTERRUPTED
        return TOO_LATE if now > row.chosen_at + self._after_s + LATE_S else None

    def give_back(
        self, claim: Claim, calls: Sequence[JudgeCall], why: str, *, final: bool, now: float
    ) -> None:
        """Keep the calls that gave no second scores, and put the group back for an hour.

        final: the judge will never score it; it is left for this reason.
        """
        group_id = claim.group.group_id
        with self._database.write() as session:
            self._save_calls(session, claim, calls, now=now)
            tried = session.scalar(
                select(RescoringRow.attempts).where(RescoringRow.group_id == group_id)
            )
            if tried is None:
                return
            if final or tried >= ATTEMPTS:
                _leave(session, group_id, why)
                return
            session.execute(
                update(RescoringRow)
                .where(RescoringRow.group_id == group_id, RescoringRow.window_number.is_(None))
                .values(due_at=now + AGAIN_S)
                .execution_options(synchronize_session=False)
            )

    def put_back(self, claim: Claim, *, now: float) -> None:
        """Undo a claim: the process stops."""
        with self._database.write(alone=False) as session:
            session.execute(
                update(RescoringRow)
                .where(
                    RescoringRow.group_id == claim.group.group_id,
                    RescoringRow.window_number.is_(None),
                )
                .values(due_at=now, attempts=RescoringRow.attempts - 1)
                .execution_options(synchronize_session=False)
            )

    def record(
        self, claim: Claim, judgement: Judgement, calls: Sequence[JudgeCall], *, now: float
    ) -> tuple[NoiseState, bool]:
        """Store second scores, and estimate their window anew.

        Returns: what is known of the judge now, and whether this says for the first time that it
        has changed.
        """
        group_id = claim.group.group_id
        both = Twice(first=claim.first, again=judgement.passes)
        with self._database.write() as session:  # alone: it gives the group its place in a window
            self._save_calls(session, claim, calls, now=now)
            known = read_noise_state(session)
            models = {call.judge_model for call in judgement.calls}
            if not usable(both):
                _leave(session, group_id, OTHER_ANSWERS)
            elif models != {claim.series.judge_model}:
                _leave(session, group_id, OTHER_JUDGE)
            else:
                window = window_for(session, claim.series)
                stored = session.scalars(
                    update(RescoringRow)
                    .where(RescoringRow.group_id == group_id, RescoringRow.window_number.is_(None))
                    .values(again=encode_passes(both.again), at=now, window_number=window)
                    .returning(RescoringRow.group_id)
                    .execution_options(synchronize_session=False)
                ).all()
                if stored:
                    count(session, STAGE, SCORED)
                    refresh(session, claim.series, window, now=now)
            state = known_noise(session, self._series, now=now)
            write_noise_state(session, state)
        news = bool(state.drift) and (
            known is None
            or (known.rubric_hash, known.drift_at) != (state.rubric_hash, state.drift_at)
        )
        return state, news

    def _save_calls(
        self, session: Session, claim: Claim, calls: Sequence[JudgeCall], *, now: float
    ) -> None:
        group_id = claim.group.group_id
        known = select(GroupRow.seq).where(GroupRow.group_id == group_id)
        if session.scalar(known) is not None:
            save_judge_calls(
                session,
                group_id,
                calls,
                rubric_hash=claim.series.rubric_hash,
                now=now,
                again=True,
            )
        else:  # deleted meanwhile: what was said of it is not kept
            for call in calls:
                count(session, "judge_calls", "good" if call.ok else "bad")
        count(session, STAGE, "calls", len(calls))


def _series_of(row: RescoringRow) -> Series:
    return Series(rubric_hash=row.rubric_hash, judge_model=row.judge_model, passes=row.passes)


def _has_time(session: Session, now: float) -> bool:
    judge = read_judge_state(session)
    if judge is None or judge.state != "works":
        return False
    fresh = select(GroupRow.seq).where(GroupRow.status == SAMPLED, GroupRow.lease_until <= now)
    return session.scalar(fresh.limit(1)) is None


def _due(now: float) -> Select[RescoringRow]:
    """Select the row that waits longest."""
    return (
        select(RescoringRow)
        .where(RescoringRow.window_number.is_(None), RescoringRow.due_at <= now)
        .order_by(RescoringRow.due_at)
        .limit(1)
    )


def _leave(session: Session, group_id: str, why: str) -> None:
    session.execute(
        delete(RescoringRow)
        .where(RescoringRow.group_id == group_id, RescoringRow.window_number.is_(None))
        .execution_options(synchronize_session=False)
    )
    count(session, STAGE, why)
