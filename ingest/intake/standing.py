"""Read what the store knows of the steps of a batch: their caps, and what tells of a spread.

Each statement is bounded by the batch, or by a limit, and served by an index.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from ingest.grouping.caps import GroupKeys
from ingest.grouping.features import Features, features_of, near_key, opening_key
from ingest.grouping.selection import Rules
from ingest.store.exchanges import StoredExchange
from sidecar.errors import UNREADABLE_JSON
from sidecar.store.contents import keyring_of
from sidecar.store.models import FeedbackRow, GroupRow, SignalRow

EARLIER: Final = 32
"""Newest groups of an opening whose outcome counts: some days of it, so that what an adapter has
learned since soon shows."""
WITHOUT_SPREAD: Final = ("identical_answers", "no_spread", "within_noise")
"""Values of `answer_group.reason` of groups whose answers earned the same."""


def keys_of(session: Session, batch: Sequence[StoredExchange]) -> dict[str, GroupKeys]:
    """Return what the groups of a batch are counted by. In an encrypted store there are no digests
    of prompts, because who has a guess of one could test it."""
    sealed = bool(keyring_of(session))
    found = {}
    for one in batch:
        if one.held_out:
            continue  # never has a group
        project, request = one.exchange.project, _object(one.exchange.request)
        found[one.exchange.exchange_id] = GroupKeys(
            project=project,
            near=None if sealed else near_key(project, request),
            opening=None if sealed else opening_key(project, request),
        )
    return found


def counts_by_keys(
    session: Session, keys: Collection[GroupKeys], rules: Rules, *, since: float
) -> dict[tuple[str, str], int]:
    """Count the groups since then by ("project", name) and ("near", key), where there is a cap."""
    found: dict[tuple[str, str], int] = {}
    if rules.max_groups_per_project:
        for name in sorted({one.project for one in keys}):
            column = GroupRow.project
            found["project", name] = _count(
                session, column, name, rules.max_groups_per_project, since
            )
    if rules.max_groups_per_near_prompt:
        for name in sorted({one.near for one in keys if one.near is not None}):
            most = rules.max_groups_per_near_prompt
            found["near", name] = _count(session, GroupRow.near_key, name, most, since)
    return found


def _count(
    session: Session,
    column: InstrumentedAttribute[str | None],
    value: str,
    most: int,
    since: float,
) -> int:
    some = (
        select(GroupRow.seq)
        .where(column == value, GroupRow.created_at >= since)
        .limit(most)
        .subquery()
    )
    return session.scalar(select(func.count()).select_from(some)) or 0


def features_in(
    session: Session, batch: Sequence[StoredExchange], keys: Mapping[str, GroupKeys]
) -> dict[str, Features]:
    """Return the features of a batch by exchange id."""
    ids = [one.exchange.exchange_id for one in batch]
    signals: dict[str, set[str]] = {}
    for name, kind in session.execute(
        select(SignalRow.exchange_id, SignalRow.kind).where(SignalRow.exchange_id.in_(ids))
    ):
        signals.setdefault(name, set()).add(kind)
    negative = set(
        session.scalars(
            select(FeedbackRow.exchange_id).where(
                FeedbackRow.exchange_id.in_(ids), FeedbackRow.score < 0
            )
        )
    )
    sessions = sorted({one.session_id for one in batch})
    unhappy = set(
        session.scalars(
            select(FeedbackRow.session_id).where(
                FeedbackRow.session_id.in_(sessions),
                FeedbackRow.target_kind != "exchange",
                FeedbackRow.score < 0,
            )
        )
    )
    openings = {one.opening for one in keys.values()}
    earlier = {one: _earlier(session, one) for one in openings if one is not None}
    return {
        one.exchange.exchange_id: features_of(
            one.exchange,
            _object(one.exchange.request),
            signals=signals.get(one.exchange.exchange_id, ()),
            negative=one.exchange.exchange_id in negative or one.session_id in unhappy,
            earlier=earlier.get(keys[one.exchange.exchange_id].opening or "", (0, 0)),
        )
        for one in batch
        if one.exchange.exchange_id in keys
    }


def _earlier(session: Session, opening: str) -> tuple[int, int]:
    """Count the newest groups of an opening whose spread is known, and those that have one."""
    rows = session.execute(
        select(GroupRow.status, GroupRow.reason)
        .where(GroupRow.opening_key == opening)
        .order_by(GroupRow.seq.desc())
        .limit(EARLIER)
    ).all()
    spread = sum(status == "trained" for status, _ in rows)
    return spread + sum(reason in WITHOUT_SPREAD for _, reason in rows), spread


def _object(request: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(request, type=dict[str, Any])
    except UNREADABLE_JSON:
        return {}
