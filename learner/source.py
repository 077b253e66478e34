"""Scored groups in the store, as the learner sees them: claim, learn from, drop, give back.

Functions work in the caller's transaction. A claimed group carries the run's id; a run that dies
gives its groups back (`give_back`), and none is ever used by two runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from ingest.records import ScoredGroup
from ingest.store.database import count
from ingest.store.groups import CLAIMED, SCORED, load_scored_group
from ingest.store.models import AdapterRow, GroupRow
from learner.staleness import runs_between

TRAINED = "trained"
DROPPED = "dropped"
STAGE = "learn"
"""The learner's stage in the durable counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Scored groups that no run has taken, the newest first."""

    fresh: tuple[str, ...]
    """Group ids that a run may learn from."""
    stale: Mapping[str, str]
    """group id -> stale | unknown_adapter"""


def waiting_groups(session: Session, *, model: str, parent: str, max_age: int) -> Waiting:
    """Sort the scored groups by whether a run that starts from `parent` may use them."""
    parents = _parents(session, model)
    rows = session.execute(
        select(GroupRow.group_id, GroupRow.adapter)
        .where(GroupRow.status == SCORED)
        .order_by(GroupRow.seq.desc())
    ).all()
    ages = {adapter: runs_between(parents, parent, adapter) for _, adapter in rows}
    fresh: list[str] = []
    stale: dict[str, str] = {}
    for group_id, adapter in rows:
        age = ages[adapter]
        if age is None:
            stale[group_id] = "unknown_adapter"
        elif age > max_age:
            stale[group_id] = "stale"
        else:
            fresh.append(group_id)
    return Waiting(fresh=tuple(fresh), stale=stale)


def count_fresh(session: Session, *, model: str, parent: str, max_age: int) -> int:
    """How many groups a run that starts from `parent` would find; cheaper than naming them."""
    parents = _parents(session, model)
    rows = session.execute(
        select(GroupRow.adapter, func.count())
        .where(GroupRow.status == SCORED)
        .group_by(GroupRow.adapter)
    ).all()
    ages = [(runs_between(parents, parent, adapter), groups) for adapter, groups in rows]
    return sum(groups for age, groups in ages if age is not None and age <= max_age)


def claim(session: Session, run_id: str, group_ids: Iterable[str]) -> None:
    """scored -> claimed, by this run."""
    _move(session, group_ids, SCORED, status=CLAIMED, run_id=run_id)


def load(session: Session, group_ids: Iterable[str]) -> tuple[list[ScoredGroup], dict[str, str]]:
    """Read groups with their scores, and those that have none: group id -> `no_scores`."""
    groups: list[ScoredGroup] = []
    broken: dict[str, str] = {}
    for group_id in group_ids:
        scored = load_scored_group(session, group_id)
        if scored is None:
            broken[group_id] = "no_scores"
        else:
            groups.append(scored)
    return groups, broken


def mark_trained(session: Session, group_ids: Iterable[str]) -> None:
    """claimed -> trained, counted."""
    count(session, STAGE, TRAINED, _move(session, group_ids, CLAIMED, status=TRAINED))


def drop(session: Session, run_id: str, reasons: Mapping[str, str], *, before: str) -> None:
    """Any status -> dropped, each with its reason, counted by reason.

    reasons: group id -> reason. before: the status that the groups have now.
    """
    for reason in Counter(reasons.values()):
        group_ids = [group_id for group_id, why in reasons.items() if why == reason]
        moved = _move(session, group_ids, before, status=DROPPED, run_id=run_id, reason=reason)
        count(session, STAGE, reason, moved)


def give_back(session: Session, run_id: str) -> int:
    """claimed -> scored, for every group of a run that did not end well. Returns: how many."""
    group_ids = session.scalars(
        select(GroupRow.group_id).where(GroupRow.run_id == run_id, GroupRow.status == CLAIMED)
    ).all()
    return _move(session, group_ids, CLAIMED, status=SCORED, run_id=None)


def _parents(session: Session, model: str) -> dict[str, str]:
    versions = session.scalars(select(AdapterRow).where(AdapterRow.model == model))
    return {version.name: version.parent for version in versions}


def _move(session: Session, group_ids: Iterable[str], before: str, **values: str | None) -> int:
    moved = 0
    for group_id in group_ids:
        statement = (
            update(GroupRow)
            .where(GroupRow.group_id == group_id, GroupRow.status == before)
            .values(**values)
            .returning(GroupRow.seq)
        )
        moved += len(session.scalars(statement).all())
    return moved
