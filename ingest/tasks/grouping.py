"""Find out which sessions are over, and make groups of them, in the store.

Every function works in the caller's write transaction, which must be alone: what it reads of a
session stays true until its group is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, cast

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from ingest.feedback.store import of_voice, voice
from ingest.tasks.keys import (
    IDLE_S,
    MOST_EXCHANGES,
    KeyKind,
    Ready,
    Step,
    draw,
    group_id_of,
    why_excluded,
)
from ingest.tasks.rewards import Outcome, Scale, reward_of, scale_of
from sidecar.settings.learning import Tasks
from sidecar.store.database import count
from sidecar.store.models import OVER, READY, ExchangeRow, FeedbackRow, TaskGroupRow, TaskMemberRow

STAGE: Final = "tasks"
"""Stage of the counters: one reason for what became of sessions and groups."""
WITHOUT_OUTCOME: Final = "without_outcome"
NO_SPREAD: Final = "no_spread"
WAITING, SCORED, SET_ASIDE, DROPPED = "waiting", "scored", "set_aside", "dropped"
MOST_OUTCOMES: Final = 200
"""Outcomes of a session that are read, those that count first."""
MOST_READY: Final = 128
"""Sessions of one key, each caller's newest first, among which a group is looked for."""
NEWEST: Final = 256
"""Finished sessions of a project that make its scale, and tell whether it has several users."""
OF_THE_JUDGE: Final = frozenset({"header", "prompt", "rehearsal"})
"""Kinds of keys whose sessions the judge may rank: they began alike, or are declared to be one
task. Over different tasks a ranking says which task was easier."""

Mode = Literal["outcome", "ruler", "mixed"]


@dataclass(frozen=True, slots=True)
class Pool:
    """What the sessions of a group have in common."""

    project: str
    kind: KeyKind
    key: str
    adapter: str


def steps_of(session: Session, session_id: str) -> list[Step]:
    """Read the exchanges of a session, in the order of storing."""
    row = ExchangeRow
    found = session.execute(
        select(
            row.seq,
            row.exchange_id,
            row.started_at,
            row.stored_at,
            row.parent_id,
            row.adapter,
            row.held_out,
            row.surface,
            row.outcome,
            row.status,
            row.untrainable_reason,
            row.task,
            row.origin,
            row.project,
            row.key_id,
            row.user,
        )
        .where(row.session_id == session_id)
        .limit(MOST_EXCHANGES + 1)
    ).all()
    return [
        Step(
            exchange_id=one.exchange_id,
            began_at=one.started_at,
            stored_at=one.stored_at,
            parent=one.parent_id,
            adapter=one.adapter,
            held_out=one.held_out,
            answered=(one.surface, one.outcome, one.status) == ("chat", "ok", 200),
            trainable=one.untrainable_reason is None,
            task=one.task,
            origin=one.origin,
            caller=(one.project, one.key_id, one.user),
        )
        for one in sorted(found, key=lambda one: one.seq)
    ]


def outcomes_of(session: Session, session_id: str) -> list[Outcome]:
    """Read what was told of how a session ended; the newest of each voice first."""
    row, place = FeedbackRow, of_voice().label("place")
    found = session.execute(
        select(voice(), row.received_at, row.reward, row.success, row.done, place)
        .where(row.session_id == session_id, row.kind == "outcome")
        .order_by(place, row.seq.desc())
        .limit(MOST_OUTCOMES)
    )
    return [
        Outcome(voice=who, received_at=at, value=reward, success=success, done=bool(done))
        for who, at, reward, success, done, _ in found
    ]


def scale_in(session: Session, project: str) -> Scale:
    """Return the scale of a project: of each of its newest sessions the median of its voices."""
    row = FeedbackRow
    every = (
        select(row.session_id, row.reward, of_voice().label("place"))
        .where(row.session_id.in_(sorted(_newest(session, project))), row.project == project)
        .where(row.kind == "outcome", row.reward.is_not(None))
        .subquery()
    )
    values: dict[str, list[float]] = {}
    for name, value, _ in session.execute(select(every).where(every.c.place == 1)):
        values.setdefault(name, []).append(value)
    return scale_of([median(of) for of in values.values()])


def _newest(session: Session, project: str) -> dict[str, str]:
    """Return the users' sessions of a project that were over last -> their callers."""
    row = TaskMemberRow
    own = select(row.session_id, row.caller).where(text(OVER), row.project == project)
    return dict(session.execute(own.order_by(row.over_at.desc()).limit(NEWEST)).all())


def close(
    session: Session, session_ids: Collection[str], settings: Tasks, *, now: float
) -> set[Pool]:
    """Mark those of these sessions that are over and have what their reward is made of, and exclude
    those that may not become members.

    A session is over when a client told its outcome, or that it is done, after its last turn began;
    or when no turn came for `IDLE_S`.
    Returns: what they are compared within.
    """
    pools: set[Pool] = set()
    row = TaskMemberRow
    members = session.scalars(
        select(row).where(
            row.session_id.in_(sorted(session_ids)),
            row.over_at.is_(None),
            row.excluded.is_(None),
            row.group_id.is_(None),
        )
    ).all()
    for member in members:
        steps = steps_of(session, member.session_id)
        if not steps:
            exclude(session, member, "moved")
            continue
        outcomes = outcomes_of(session, member.session_id)
        newest = max(step.began_at for step in steps)
        ended = [one.received_at for one in outcomes if one.ends and one.received_at >= newest]
        if not ended and max(step.stored_at for step in steps) > now - IDLE_S:
            continue
        if settings.learn != "ruler" and not any(one.tells for one in outcomes):
            count(session, STAGE, WITHOUT_OUTCOME)
            continue
        if (why := why_excluded(steps)) is not None:
            exclude(session, member, why)
            continue
        member.over_at = max(ended) if ended else now
        count(session, STAGE, "over")
        kind = cast(KeyKind, member.key_kind)
        pools.add(Pool(member.project, kind, member.key, member.adapter))
    session.flush()
    return pools


def exclude(session: Session, member: TaskMemberRow, why: str) -> None:
    """Take a session out of all groups to come."""
    member.excluded = why
    count(session, STAGE, why)


def draw_groups(session: Session, pool: Pool, settings: Tasks, *, now: float) -> int:
    """Make as many groups as the finished sessions of a pool give. Returns: how many."""
    row = TaskMemberRow
    turn = func.row_number().over(partition_by=row.caller, order_by=row.over_at.desc())
    ready = session.scalars(
        select(row)
        .where(text(READY), row.key == pool.key, row.adapter == pool.adapter)
        .order_by(turn, row.over_at.desc())
        .limit(MOST_READY)
    ).all()
    known = set(_newest(session, pool.project).values())
    left = {one.session_id: one for one in ready}
    made = 0
    while chosen := draw(
        [
            Ready(session_id=one.session_id, caller=one.caller, began_at=one.began_at)
            for one in left.values()
        ],
        kind=pool.kind,
        size=settings.size,
        known=known,
    ):
        members = [left[one.session_id] for one in chosen]
        unfit = _settle(session, members, settings)
        for member in unfit or members:
            del left[member.session_id]
        if not unfit:
            _store(session, pool, members, settings, now=now)
            made += 1
    session.flush()
    return made


def _settle(
    session: Session, members: Sequence[TaskMemberRow], settings: Tasks
) -> list[TaskMemberRow]:
    """Set exchanges and rewards of the members of a group. Returns: those that do not fit any more,
    because of what arrived since they were over."""
    scale = scale_in(session, members[0].project)
    unfit = []
    for member in members:
        over_at = member.over_at or 0.0
        steps = [one for one in steps_of(session, member.session_id) if one.began_at <= over_at]
        why = why_excluded(steps)
        reward = reward_of(outcomes_of(session, member.session_id), scale)
        if why is not None:
            exclude(session, member, why)
            unfit.append(member)
        elif settings.learn != "ruler" and reward is None:  # its outcome was deleted
            member.over_at = None
            unfit.append(member)
        else:
            member.exchange_ids = [step.exchange_id for step in steps]
            member.reward = reward if settings.learn != "ruler" else None
    return unfit


def _store(
    session: Session,
    pool: Pool,
    members: Sequence[TaskMemberRow],
    settings: Tasks,
    *,
    now: float,
) -> None:
    """Store a group; its members have exchanges and, but for the judge's, rewards."""
    group_id = group_id_of([one.session_id for one in members])
    group = TaskGroupRow(
        group_id=group_id,
        project=pool.project,
        key_kind=pool.kind,
        key=pool.key,
        adapter=pool.adapter,
        status=WAITING,
        created_at=now,
    )
    session.add(group)
    for place, member in enumerate(members):
        member.group_id, member.place, member.source = group_id, place, None
        session.execute(
            update(ExchangeRow)
            .where(ExchangeRow.exchange_id.in_(member.exchange_ids or []))
            .values(task_group_id=group_id)
            .execution_options(synchronize_session=False)
        )
    count(session, STAGE, "drawn")
    ties = len({one.reward for one in members}) < len(members)
    mixed = settings.learn == "mixed" and pool.kind in OF_THE_JUDGE
    judged = settings.learn == "ruler" or (mixed and ties)
    if not judged:
        mark_scored(
            session, group, members, [one.reward or 0.0 for one in members], "outcome", now=now
        )


def mark_scored(
    session: Session,
    group: TaskGroupRow,
    members: Sequence[TaskMemberRow],
    rewards: Sequence[float],
    source: Literal["outcome", "ruler", "mixed"],
    *,
    now: float,
) -> None:
    """Store the rewards of a group. Without a spread nothing can be learned: it is set aside."""
    for member, reward in zip(members, rewards, strict=True):
        member.reward, member.source = reward, source
    spread = len(set(rewards)) > 1
    group.status = SCORED if spread else SET_ASIDE
    group.reason = None if spread else NO_SPREAD
    group.scored_at = now
    count(session, STAGE, "scored" if spread else NO_SPREAD)
    session.flush()


def members_of(session: Session, group_id: str) -> Sequence[TaskMemberRow]:
    """Return the members of a group, by their places."""
    found = session.scalars(select(TaskMemberRow).where(TaskMemberRow.group_id == group_id))
    return sorted(found, key=lambda one: one.place or 0)


def correct(session: Session, session_ids: Collection[str], *, now: float) -> None:
    """Make the rewards of groups anew of which an outcome was corrected before a run took them."""
    row = TaskMemberRow
    found = session.scalars(
        select(row.group_id).where(
            row.session_id.in_(sorted(session_ids)),
            row.group_id.is_not(None),
            row.source == "outcome",
        )
    )
    for group_id in sorted({one for one in found if one is not None}):
        group = session.scalar(select(TaskGroupRow).where(TaskGroupRow.group_id == group_id))
        if group is None or group.status not in (SCORED, SET_ASIDE):
            continue
        members = members_of(session, group_id)
        scale = scale_in(session, group.project)
        outcomes = [reward_of(outcomes_of(session, one.session_id), scale) for one in members]
        rewards = [one for one in outcomes if one is not None]
        if len(rewards) == len(members) and rewards != [one.reward for one in members]:
            count(session, STAGE, "corrected")
            mark_scored(session, group, members, rewards, "outcome", now=now)
