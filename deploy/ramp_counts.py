"""Count what users got from each arm of a ramp, from the `exchange` table.

The candidate's replies count from the start of the present step. The champion's do too, but when
there are fewer than a step needs (at a high weight it answers hardly anyone) its newest earlier
ones join them, so that the candidate is never measured against nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from deploy.answer_shape import is_short
from deploy.canary import ArmCounts, RampEvidence
from deploy.records import Trial
from ingest.store.database import decompress
from ingest.store.models import ChoiceRow, ExchangeRow

WINDOW = 500
"""Newest replies of an arm that are looked at; a step that needs more looks at as many."""


def count_ramp(session: Session, trial: Trial, *, step_min_exchanges: int) -> RampEvidence:
    """Both arms' counts in the present step of a ramping trial."""
    window = max(WINDOW, step_min_exchanges)
    since = ExchangeRow.started_at >= trial.step_started_at
    candidate = _newest(session, trial, trial.candidate, "canary", window, since)
    champion = _newest(session, trial, trial.champion, "champion", window, since)
    if len(champion) < step_min_exchanges:
        ever = ExchangeRow.started_at >= 0
        champion = _newest(session, trial, trial.champion, "champion", step_min_exchanges, ever)
    return RampEvidence(candidate=_counts(session, candidate), champion=_counts(session, champion))


def _newest(
    session: Session,
    trial: Trial,
    adapter: str,
    arm: str,
    limit: int,
    when: ColumnElement[bool],
) -> Sequence[ExchangeRow]:
    # A reply that the client cut, or a request that vLLM refused as the client's fault, says
    # nothing of the arm. 404 does: vLLM has lost the adapter.
    ours = or_(ExchangeRow.status < 400, ExchangeRow.status == 404, ExchangeRow.status >= 500)
    failed = ExchangeRow.outcome == "upstream_error"
    statement = (
        select(ExchangeRow)
        .where(
            ExchangeRow.public_model == trial.model,
            ExchangeRow.adapter == adapter,
            ExchangeRow.arm == arm,
            or_(failed, and_(ExchangeRow.outcome == "ok", ours)),
            when,
        )
        .order_by(ExchangeRow.seq.desc())
        .limit(limit)
    )
    return session.scalars(statement).all()


def _counts(session: Session, rows: Sequence[ExchangeRow]) -> ArmCounts:
    failed = {row.exchange_id for row in rows if row.outcome != "ok" or row.status >= 400}
    complete = [row.exchange_id for row in rows if row.exchange_id not in failed]
    said_something: set[str] = set()
    short: set[str] = set()
    choices = session.scalars(select(ChoiceRow).where(ChoiceRow.exchange_id.in_(complete)))
    for choice in choices:
        if is_short(json.loads(decompress(choice.message_body)), choice.finish_reason):
            short.add(choice.exchange_id)
        else:
            said_something.add(choice.exchange_id)
    without_choices = set(complete) - short - said_something
    return ArmCounts(replies=len(rows), errors=len(failed), short=len(short) + len(without_choices))
