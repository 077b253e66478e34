"""Read what became of the newest records: a fixed number of each, whatever the store holds."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.doctor.facts import LastRun, Recent
from deploy.registry.tallies import fields_refused
from ingest.store.groups import SET_ASIDE
from learner.runs.source import DROPPED
from sidecar.store.models import AdapterRow, AnswerRow, ExchangeRow, GroupRow, RunRow

EXCHANGES = 200
GROUPS = 100
CLOCKS = 20
"""Exchanges that are asked for both clocks; all must say the same."""


def read_recent(session: Session) -> Recent:
    exchanges = session.execute(
        select(ExchangeRow.selection, ExchangeRow.started_at, ExchangeRow.stored_at)
        .order_by(ExchangeRow.seq.desc())
        .limit(EXCHANGES)
    ).all()
    groups = session.execute(
        select(GroupRow.group_id, GroupRow.status, GroupRow.reason, GroupRow.detail)
        .order_by(GroupRow.seq.desc())
        .limit(GROUPS)
    ).all()
    served = session.scalars(
        select(AnswerRow.untrainable_reason).where(
            AnswerRow.group_id.in_([one.group_id for one in groups]), AnswerRow.origin == "served"
        )
    )
    ended = [one for one in groups if one.status in (SET_ASIDE, DROPPED)]
    ahead = [
        one.started_at - one.stored_at
        for one in exchanges[:CLOCKS]
        if isinstance(one.started_at, float) and isinstance(one.stored_at, float)
    ]
    return Recent(
        selections=Counter(str(one.selection) for one in exchanges),
        served=Counter(str(why or "trainable") for why in served),
        ends=Counter(
            str(one.reason if one.status in (SET_ASIDE, DROPPED) else one.status) for one in groups
        ),
        detail=str(ended[0].detail or "") if ended else "",
        fields_refused=fields_refused(session),
        started_ahead_s=max(0.0, min(ahead, default=0.0)),
    )


def newest_run(session: Session, model: str) -> LastRun | None:
    row = session.execute(
        select(RunRow.status, RunRow.reason, RunRow.started_at)
        .where(RunRow.model == model)
        .order_by(RunRow.started_at.desc())
        .limit(1)
    ).first()
    return None if row is None else LastRun(status=str(row[0]), reason=str(row[1] or ""), at=row[2])


def newest_adapter(session: Session, model: str) -> tuple[str, str, str] | None:
    """Return name, state and reason of the newest version."""
    row = session.execute(
        select(AdapterRow.name, AdapterRow.state, AdapterRow.reason)
        .where(AdapterRow.model == model)
        .order_by(AdapterRow.version.desc())
        .limit(1)
    ).first()
    return None if row is None else (str(row[0]), str(row[1]), str(row[2] or ""))
