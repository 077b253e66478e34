"""What becomes of whole tasks when exchanges of their sessions are deleted.

A group that is not trained yet ends with the first session that it loses: its rewards compare what
is not there any more. Of a session that an adapter learned from stays a digest, as of a group of
answers, by which `sidecar forget` finds the adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.store.groups import CLAIMED
from ingest.store.sessions import name_digest
from sidecar.store.database import count, insert_into
from sidecar.store.models import (
    ExchangeRow,
    GroupDigestRow,
    GroupRow,
    JudgeCallRow,
    RunRow,
    TaskGroupRow,
    TaskMemberRow,
)

STAGE: Final = "tasks"
ENDED: Final = ("trained", "dropped")
"""Statuses that a group keeps."""


def claimed_tasks(session: Session, exchange_ids: Collection[str]) -> dict[str, str]:
    """Return those of these exchanges whose task group a training run has now, each with the
    run."""
    row = TaskGroupRow
    found = session.execute(
        select(ExchangeRow.exchange_id, row.run_id)
        .join(row, row.group_id == ExchangeRow.task_group_id)
        .where(ExchangeRow.exchange_id.in_(exchange_ids), row.status == CLAIMED)
    )
    return {name: run_id or "" for name, run_id in found}


def end_tasks(
    session: Session,
    exchange_ids: Sequence[str],
    why: Literal["expired", "forgotten"],
    *,
    now: float,
) -> list[TaskGroupRow]:
    """Delete the members that these exchanges belong to, before the exchanges themselves, and end
    their groups. Of what an adapter learned from, a member stays until its last exchange expires.

    Returns: the groups that lost a member.
    """
    places = {
        one.exchange_id: one
        for one in session.execute(
            select(
                ExchangeRow.exchange_id,
                ExchangeRow.session_id,
                ExchangeRow.user,
                ExchangeRow.task_group_id,
            ).where(ExchangeRow.exchange_id.in_(exchange_ids))
        )
    }
    row = TaskMemberRow
    drawn = row.group_id.in_({one.task_group_id for one in places.values()} - {None})
    named = row.session_id.in_({one.session_id for one in places.values()})
    found = {
        member.session_id: member
        for where in (drawn, named)  # each by its own index
        for member in session.scalars(select(row).where(where))
    }
    lost: dict[str, TaskGroupRow] = {}
    for member in found.values():
        own = [name for name in member.exchange_ids or () if name in places]
        if member.group_id is not None and not own:
            continue  # the session of another member, or a turn that did not count
        group = _group(session, member.group_id)
        if group is not None and group.status == "trained" and why == "expired":
            left = [name for name in member.exchange_ids or () if name not in places]
            if left:
                member.exchange_ids = left
                continue
        if group is not None:
            lost[group.group_id] = group
            _keep_digest(session, group, member, places[own[0]], why == "forgotten", now)
        session.delete(member)
        count(session, STAGE, f"deleted_{why}")
    session.flush()
    for group in lost.values():
        _end(session, group, why)
    return list(lost.values())


def _group(session: Session, group_id: str | None) -> TaskGroupRow | None:
    if group_id is None:
        return None
    return session.scalar(select(TaskGroupRow).where(TaskGroupRow.group_id == group_id))


def _end(session: Session, group: TaskGroupRow, why: str) -> None:
    # The judge may have quoted any of its sessions.
    session.execute(delete(JudgeCallRow).where(JudgeCallRow.group_id == group.group_id))
    if group.status not in ENDED:
        group.status, group.reason, group.detail = "dropped", why, None
        count(session, STAGE, why)
    left = select(TaskMemberRow.session_id).where(TaskMemberRow.group_id == group.group_id)
    if session.scalar(left.limit(1)) is None:
        session.delete(group)
    session.flush()


def _keep_digest(
    session: Session,
    group: TaskGroupRow,
    member: TaskMemberRow,
    place: Any,  # Any: a row
    forgotten: bool,
    now: float,
) -> None:
    """Keep what a lineage needs of a session that a run had which made an adapter."""
    made = select(RunRow.adapter).where(RunRow.run_id == group.run_id)
    if group.run_id is None or session.scalar(made) is None:
        return
    values = digest_of(group, place.session_id, place.user, forgotten=forgotten, now=now) | {
        "group_id": f"{group.group_id}-{member.place}",
        "exchange_id": place.exchange_id,
        "scores": [member.reward],
    }
    session.execute(insert_into(session, GroupDigestRow).values(values).on_conflict_do_nothing())


def digest_of(
    group: GroupRow | TaskGroupRow, session_id: str, user: str, *, forgotten: bool, now: float
) -> dict[str, object]:
    """Return columns of `group_digest`: all but those of what was said, and of the exchange."""
    return {
        "group_id": group.group_id,
        "group_seq": group.seq,
        "run_id": group.run_id,
        "session_digest": name_digest("session", session_id),
        "user_digest": name_digest("user", user),
        "content_digest": "",
        "adapter": group.adapter,
        "status": group.status,
        "reason": group.reason,
        "rewards": None,
        "judge_model": group.judge_model,
        "rubric_hash": group.rubric_hash,
        "deleted_at": now,
        "forgotten": forgotten,
    }
