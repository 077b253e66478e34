"""Read what clients and the traffic told of exchanges. Nothing learns from it yet: whoever will
reads it here (`told_of`, `Told.summary`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, case, func, literal, select
from sqlalchemy.orm import Session

from sidecar.store.models import ApiKeyRow, ExchangeRow, FeedbackRow, SignalRow

MOST: Final = 1_000
"""Feedback, and signals, that are read at once, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackEntry:
    """One piece of feedback or one outcome as it is shown."""

    feedback_id: str
    kind: str
    target_kind: str
    target: str
    source: str
    received_at: float
    score: float | None
    success: bool | None
    reward: float | None
    cost: float | None
    label: str
    comment: str
    counts: bool = True
    """It is the newest of its kind, its target and its voice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalEntry:
    """One implicit signal as it is shown."""

    kind: str
    exchange_id: str
    by_id: str | None
    at: float
    evidence: dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class Told:
    """All that is known of an exchange, or of a session, but its content."""

    feedback: tuple[FeedbackEntry, ...] = ()
    """Feedback and outcomes, the oldest first."""
    signals: tuple[SignalEntry, ...] = ()

    def objects(self) -> dict[str, Any]:  # Any: JSON
        """Return it as JSON: `feedback`, `outcomes` and `signals`."""
        return {
            "feedback": [asdict(one) for one in self.feedback if one.kind == "feedback"],
            "outcomes": [asdict(one) for one in self.feedback if one.kind == "outcome"],
            "signals": [asdict(one) for one in self.signals],
        }

    def summary(self) -> dict[str, Any]:  # Any: JSON
        """Return one value for each question, of the entries that count; None: nobody said.

        Where sources disagree, `feedback_score` and `reward` are means, and `success` is what more
        of them say (None when they are even).
        """
        counting = [one for one in self.feedback if one.counts]
        said = [1 if one.success else -1 for one in counting if one.success is not None]
        return {
            "feedback_score": _mean([one.score for one in counting if one.score is not None]),
            "success": None if sum(said) == 0 else sum(said) > 0,
            "reward": _mean([one.reward for one in counting if one.reward is not None]),
            "signals": sorted({one.kind for one in self.signals}),
        }


def told_of(session: Session, exchange_ids: Iterable[str]) -> dict[str, Told]:
    """Return what was told of each exchange, by its id: of itself, its trace and its session."""
    places = session.execute(
        select(
            ExchangeRow.exchange_id,
            ExchangeRow.project,
            ExchangeRow.trace_id,
            ExchangeRow.session_id,
        ).where(ExchangeRow.exchange_id.in_(sorted(exchange_ids)))
    )
    keys = {name: (project, trace, of) for name, project, trace, of in places}
    if not keys:
        return {}
    traces = {trace for _, trace, _ in keys.values() if trace}
    sessions = {name for _, _, name in keys.values()}
    entries = [
        *_feedback(
            session,
            FeedbackRow.exchange_id.in_(sorted(keys)),
            FeedbackRow.target_kind == "exchange",
        ),
        *_feedback(
            session,
            FeedbackRow.session_id.in_(sorted(sessions)),
            FeedbackRow.target_kind == "session",
        ),
    ]
    if traces:
        entries += _feedback(
            session, FeedbackRow.target.in_(sorted(traces)), FeedbackRow.target_kind == "trace"
        )
    by_name: dict[tuple[str, ...], list[FeedbackEntry]] = {}
    for row, entry in entries:
        if row.exchange_id is None:
            continue
        name = {
            "exchange": ("exchange", row.exchange_id),
            "session": ("session", str(row.session_id)),
        }.get(row.target_kind, ("trace", row.project, row.target))
        by_name.setdefault(name, []).append(entry)
    signals: dict[str, list[SignalEntry]] = {}
    for signal in _signals(session, SignalRow.exchange_id.in_(sorted(keys))):
        signals.setdefault(signal.exchange_id, []).append(signal)
    return {
        exchange_id: Told(
            _in_order(
                one
                for name in (
                    ("exchange", exchange_id),
                    ("trace", project, trace),
                    ("session", session_id),
                )
                for one in by_name.get(name, ())
            ),
            tuple(signals.get(exchange_id, ())),
        )
        for exchange_id, (project, trace, session_id) in keys.items()
    }


def told_of_session(session: Session, session_id: str) -> Told:
    """Return what was told of a session, its exchanges and its traces."""
    rows = _feedback(session, FeedbackRow.session_id == session_id)
    found = _signals(session, SignalRow.session_id == session_id)
    return Told(_in_order(entry for _, entry in rows), tuple(found))


def voice() -> ColumnElement[str]:
    """Return whose opinion a row of feedback is: its key's, because a key may name any source. The
    source's where the key has the scope `voices`, and where no keys are asked for."""
    row, key = FeedbackRow, ApiKeyRow
    spoken_for = select(key.key_id).where((" " + key.scopes + " ").contains(" voices "))
    named = (row.key_id == "") | row.key_id.in_(spoken_for)
    return row.key_id + case((named, literal("/") + row.source), else_="")


def rank() -> ColumnElement[int]:
    """Return 1 for the row of its kind and target that the proxy received last from its voice.

    A session has several names: its own, its client's, those of its exchanges. It is one target.
    """
    row = FeedbackRow
    joined = (row.target_kind == "session") & row.session_id.is_not(None)
    target = case((joined, row.session_id), else_=row.target)
    return func.row_number().over(
        partition_by=(row.kind, row.target_kind, target, row.project, voice()),
        order_by=(row.received_at.desc(), row.feedback_id.desc()),
    )


def _feedback(
    session: Session, *where: ColumnElement[bool]
) -> list[tuple[FeedbackRow, FeedbackEntry]]:
    """Read rows, those that count first, so that no voice keeps others out of the newest `MOST`."""
    place = rank().label("place")
    statement = (
        select(FeedbackRow, place).where(*where).order_by(place, FeedbackRow.seq.desc()).limit(MOST)
    )
    return [(row, _entry(row, counts=at == 1)) for row, at in session.execute(statement)]


def _signals(session: Session, where: ColumnElement[bool]) -> list[SignalEntry]:
    rows = session.scalars(select(SignalRow).where(where).limit(MOST))
    found = [
        SignalEntry(
            kind=row.kind,
            exchange_id=row.exchange_id,
            by_id=row.by_id,
            at=row.at,
            evidence=row.evidence if isinstance(row.evidence, dict) else {},
        )
        for row in rows
    ]
    return sorted(found, key=lambda one: (one.at, one.exchange_id, one.kind))


def _entry(row: FeedbackRow, *, counts: bool) -> FeedbackEntry:
    names = FeedbackEntry.__dataclass_fields__.keys() - {"counts"}
    return FeedbackEntry(counts=counts, **{name: getattr(row, name) for name in names})


def _in_order(entries: Iterable[FeedbackEntry]) -> tuple[FeedbackEntry, ...]:
    return tuple(sorted(entries, key=lambda one: (one.received_at, one.feedback_id)))


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
