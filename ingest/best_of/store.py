"""Scores of best-of-N requests in the store, until their exchange arrives.

The scores arrive first, on a socket, and the exchange later, on the bus. The code that stores the
second of the two makes the group (`ingest.best_of.groups`) and removes the scores from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from sidecar.store.database import insert_into
from sidecar.store.models import BestOfScoreRow


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfScores:
    """The judge's scores of one request's answers, given while its user waited."""

    exchange_id: str
    at: float
    answers_digest: str
    """Hash of the judged answers, as the judge saw them, in order."""
    scores: tuple[float, ...]
    """[N] unitless, 0..1, by choice index."""
    explanations: tuple[str, ...]
    """[N] the judge's explanations, by choice index."""
    judge_model: str
    rubric_hash: str


def save_scores(session: Session, scores: BestOfScores) -> bool:
    """Store the scores. Returns: False, with nothing changed, when the exchange has some."""
    statement = (
        insert_into(session, BestOfScoreRow)
        .on_conflict_do_nothing()
        .values(
            exchange_id=scores.exchange_id,
            at=scores.at,
            answers_digest=scores.answers_digest,
            scores=list(scores.scores),
            explanations=list(scores.explanations),
            judge_model=scores.judge_model,
            rubric_hash=scores.rubric_hash,
        )
    )
    return session.scalar(statement.returning(BestOfScoreRow.exchange_id)) is not None


def load_scores(session: Session, exchange_ids: Sequence[str]) -> dict[str, BestOfScores]:
    """Return the scores that wait for these exchanges, by exchange id."""
    rows = session.scalars(
        select(BestOfScoreRow).where(BestOfScoreRow.exchange_id.in_(exchange_ids))
    )
    return {row.exchange_id: _scores(row) for row in rows}


def oldest_scores(session: Session, *, limit: int) -> list[BestOfScores]:
    """List waiting scores, the oldest first."""
    rows = session.scalars(select(BestOfScoreRow).order_by(BestOfScoreRow.at).limit(limit))
    return [_scores(row) for row in rows]


def remove_scores(session: Session, exchange_id: str) -> None:
    """Remove scores that have become a group, or never will."""
    session.execute(delete(BestOfScoreRow).where(BestOfScoreRow.exchange_id == exchange_id))


def _scores(row: BestOfScoreRow) -> BestOfScores:
    return BestOfScores(
        exchange_id=row.exchange_id,
        at=row.at,
        answers_digest=row.answers_digest,
        scores=tuple(row.scores),
        explanations=tuple(row.explanations),
        judge_model=row.judge_model,
        rubric_hash=row.rubric_hash,
    )
