"""Scores of best-of-N requests in the store, until their exchange arrives.

The scores arrive first, on a socket, and the exchange later, on the bus. The code that stores the
second of the two makes the group (`ingest.best_of.groups`) and removes the scores from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import msgspec
import structlog
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from sidecar.store.contents import keyring_of
from sidecar.store.database import count, insert_into
from sidecar.store.keyring import MissingKeyError, place_in
from sidecar.store.models import BestOfScoreRow

STAGE = "best_of"
"""Stage of the counter rows: ("best_of", outcome) -> requests."""
UNREADABLE = "unreadable"

log = structlog.get_logger()


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
            explanations=[
                keyring_of(session).seal_text(words, _place(scores.exchange_id))
                for words in scores.explanations
            ],
            judge_model=scores.judge_model,
            rubric_hash=scores.rubric_hash,
        )
    )
    return session.scalar(statement.returning(BestOfScoreRow.exchange_id)) is not None


def load_scores(session: Session, exchange_ids: Sequence[str]) -> dict[str, BestOfScores]:
    """Return the scores that wait for these exchanges, by exchange id; damaged ones are removed."""
    if not any_scores(session):
        return {}  # nearly always
    rows = session.scalars(
        select(BestOfScoreRow).where(BestOfScoreRow.exchange_id.in_(exchange_ids))
    )
    return {scores.exchange_id: scores for scores in _readable(session, rows.all())}


def oldest_scores(session: Session, *, limit: int) -> list[BestOfScores]:
    """List waiting scores, the oldest first; damaged ones are removed."""
    rows = session.scalars(select(BestOfScoreRow).order_by(BestOfScoreRow.at).limit(limit))
    return _readable(session, rows.all())


def any_scores(session: Session) -> bool:
    """Return True when scores wait."""
    return session.scalar(select(BestOfScoreRow.exchange_id).limit(1)) is not None


def remove_scores(session: Session, exchange_id: str) -> None:
    """Remove scores that have become a group, or never will."""
    session.execute(delete(BestOfScoreRow).where(BestOfScoreRow.exchange_id == exchange_id))


def _place(exchange_id: str) -> bytes:
    return place_in("best_of_score", "explanations", exchange_id)


def _readable(session: Session, rows: Sequence[BestOfScoreRow]) -> list[BestOfScores]:
    """Read rows. A damaged one is counted and removed; selection then decides its exchange."""
    found = []
    for row in rows:
        values = {field.name: getattr(row, field.name) for field in fields(BestOfScores)}
        try:
            scores = msgspec.convert(values, BestOfScores)
            opened = tuple(
                keyring_of(session).open_text(words, _place(row.exchange_id))
                for words in scores.explanations
            )
            found.append(replace(scores, explanations=opened))
        except MissingKeyError as error:
            log.error("best_of_scores_unreadable", exchange_id=row.exchange_id, why=str(error))
        except ValueError as error:
            log.error("best_of_scores_unreadable", exchange_id=row.exchange_id, why=str(error))
            remove_scores(session, row.exchange_id)
            count(session, STAGE, UNREADABLE)
    return found
