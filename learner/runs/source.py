"""Scored groups in the store, as the learner sees them: claim, learn from, drop, give back.

Functions work in the caller's transaction. A claimed group carries the run's id; a run that dies
gives its groups back (`give_back`), and none is ever used by two runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from ingest.records import ScoredGroup
from ingest.store.groups import CLAIMED, SCORED, load_scored_group, stored_tokens
from learner.records import Fault, Parent
from learner.runs.staleness import runs_between
from sidecar.store.database import DAMAGE, count
from sidecar.store.models import AdapterRow, GroupRow

TRAINED = "trained"
DROPPED = "dropped"
STAGE = "learn"
"""The learner's stage in the durable counters."""
MOST_TOKENS = 1_000_000
MOST_PACKS = 16
"""All answers of a group together may have so many tokens, or so many times `learner.pack_tokens`.
A group with more is not read: its arrays would fill the memory before they could be judged."""
DETAIL_LENGTH = 500
"""Characters of a reason in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Scored groups that no run has taken, the newest first."""

    fresh: tuple[str, ...]
    """Group ids that a run may learn from."""
    stale: Mapping[str, str]
    """group id -> stale | unknown_adapter"""
    failures: Mapping[str, int]
    """Fresh group id -> failed runs that it is suspected of; those with none are left out."""


def waiting_groups(session: Session, *, model: str, parent: str, max_age: int) -> Waiting:
    """Sort the scored groups by whether a run that starts from `parent` may use them."""
    parents = _parents(session, model)
    rows = session.execute(
        select(GroupRow.group_id, GroupRow.adapter, GroupRow.learn_attempts)
        .where(GroupRow.status == SCORED)
        .order_by(GroupRow.seq.desc())
    ).all()
    ages = {adapter: runs_between(parents, parent, adapter) for _, adapter, _ in rows}
    fresh: list[str] = []
    stale: dict[str, str] = {}
    failures: dict[str, int] = {}
    for group_id, adapter, failed in rows:
        age = ages[adapter]
        if age is None:
            stale[group_id] = "unknown_adapter"
        elif age > max_age:
            stale[group_id] = "stale"
        else:
            fresh.append(group_id)
            failures |= {group_id: failed} if failed else {}
    return Waiting(fresh=tuple(fresh), stale=stale, failures=failures)


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


def load(
    session: Session, group_ids: Iterable[str], *, pack_tokens: int
) -> tuple[list[ScoredGroup], dict[str, Fault]]:
    """Read groups with their scores, and say of each that cannot be used why: group id -> fault.

    pack_tokens: a group with a longer prompt is not read at all.
    """
    groups: list[ScoredGroup] = []
    broken: dict[str, Fault] = {}
    for group_id in group_ids:
        prompt, answers = stored_tokens(session, group_id)
        if prompt > pack_tokens or answers > max(MOST_TOKENS, MOST_PACKS * pack_tokens):
            text = f"its prompt has {prompt} tokens and its answers {answers}"
            broken[group_id] = Fault("too_long", text)
            continue
        try:
            scored = load_scored_group(session, group_id)
        except DAMAGE as error:
            broken[group_id] = Fault("unreadable", f"{type(error).__name__}: {error}")
            continue
        if scored is None:
            broken[group_id] = Fault("no_scores", "scores are missing")
        else:
            groups.append(scored)
    return groups, broken


def samplers(session: Session, model: str, names: Iterable[str]) -> dict[str, Parent]:
    """The registered adapters of these names."""
    rows = session.scalars(
        select(AdapterRow).where(AdapterRow.model == model, AdapterRow.name.in_(set(names)))
    )
    return {row.name: as_parent(row) for row in rows}


def as_parent(row: AdapterRow) -> Parent:
    """A registered version as something to compute with."""
    return Parent(name=row.name, version=row.version, digest=row.digest, path=Path(row.path))


def mark_trained(session: Session, group_ids: Iterable[str]) -> None:
    """claimed -> trained, counted."""
    count(session, STAGE, TRAINED, _move(session, group_ids, CLAIMED, status=TRAINED))


def drop(
    session: Session,
    run_id: str,
    reasons: Mapping[str, str],
    *,
    before: str,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Any status -> dropped, each with its reason, counted by reason.

    reasons: group id -> reason. before: the status that the groups have now. texts: group id -> the
        reason in words, where there is more to say.
    """
    moved: Counter[str] = Counter()
    for group_id, reason in reasons.items():
        text = (texts or {}).get(group_id)
        detail = text[:DETAIL_LENGTH] if text is not None else None
        values = {"status": DROPPED, "run_id": run_id, "reason": reason, "detail": detail}
        moved[reason] += _move(session, [group_id], before, **values)
    for reason, groups in moved.items():
        count(session, STAGE, reason, groups)


def give_back(session: Session, run_id: str, group_ids: Iterable[str] | None = None) -> int:
    """claimed -> scored, for groups of a run that were not trained on.

    group_ids: None: all of them. Returns: how many.
    """
    held = session.scalars(
        select(GroupRow.group_id).where(GroupRow.run_id == run_id, GroupRow.status == CLAIMED)
    ).all()
    returned = held if group_ids is None else set(held) & set(group_ids)
    return _move(session, returned, CLAIMED, status=SCORED, run_id=None)


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
