"""Store signals, and take back abandonments that later records disprove."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import delete, select, tuple_
from sqlalchemy.orm import Session

from ingest.feedback.deriving import Derived, first_of_each
from ingest.feedback.drawn_again import draw_again
from ingest.feedback.signals import Signal, SignalKind
from ingest.grouping.features import DISCONTENT
from sidecar.store.database import count, insert_into
from sidecar.store.models import SignalRow

STAGE = "signal"
"""Stage of the counters: one reason for each kind."""
WITHDRAWN = "abandonment_withdrawn"
MOVED_AWAY = "withdrawn_by_move"
"""An exchange that showed it continues another exchange than was known."""
ABANDONMENT: SignalKind = "abandonment"
BY_SIBLINGS: tuple[SignalKind, ...] = ("regeneration", "correction", "retry")


def save_derived(session: Session, derived: Derived) -> None:
    """Store what a batch shows, in the caller's transaction, and delete what moves disprove."""
    _withdraw_moved(session, derived)
    save_signals(session, derived.signals)


def _withdraw_moved(session: Session, derived: Derived) -> None:
    """Delete the stored signals about regrouped families that they do not show."""
    about = [
        *(
            (name, kind)
            for one in derived.regrouped
            for name in one.children
            for kind in BY_SIBLINGS
        ),
        *((one.parent, "tool_error") for one in derived.regrouped if one.parent is not None),
    ]
    if not about:
        return
    shown = {(one.exchange_id, one.kind, one.by_id) for one in first_of_each(derived.signals)}
    stored = session.execute(
        select(SignalRow.exchange_id, SignalRow.kind, SignalRow.by_id).where(
            SignalRow.exchange_id.in_(sorted({name for name, _ in about}))
        )
    ).all()
    scope = set(about)
    wrong = [
        (name, kind)
        for name, kind, by_id in stored
        if (name, kind) in scope and (name, kind, by_id) not in shown
    ]
    if wrong:
        _delete(session, wrong)
        count(session, STAGE, MOVED_AWAY, len(wrong))


def save_signals(session: Session, signals: Iterable[Signal]) -> None:
    """Store signals, in the caller's transaction. Of one exchange and kind the earliest one stays,
    so the order of arrival makes no difference. Answers that a user was discontent with are drawn
    again."""
    found = first_of_each(signals)
    if not found:
        return
    keys = [(one.exchange_id, one.kind) for one in found]
    known: dict[tuple[str, str], float] = {
        (exchange_id, kind): at
        for exchange_id, kind, at in session.execute(
            select(SignalRow.exchange_id, SignalRow.kind, SignalRow.at).where(
                SignalRow.exchange_id.in_(sorted({name for name, _ in keys}))
            )
        )
    }
    for one in found:
        before = known.get((one.exchange_id, one.kind))
        if before is not None and before <= one.at:
            continue
        values = {
            "session_id": one.session_id,
            "by_id": one.by_id,
            "at": one.at,
            "evidence": one.evidence,
        }
        statement = insert_into(session, SignalRow).values(
            exchange_id=one.exchange_id, kind=one.kind, **values
        )
        session.execute(
            statement.on_conflict_do_update(index_elements=["exchange_id", "kind"], set_=values)
        )
        if before is None:
            count(session, STAGE, one.kind)
    new = (one for one in found if (one.exchange_id, one.kind) not in known)
    draw_again(session, {one.exchange_id for one in new if one.kind in DISCONTENT})


def withdraw_abandonments(session: Session, began: Mapping[str, Collection[float]]) -> None:
    """Delete the abandonments of sessions that went on in time, as an exchange shows that came
    late. began: session -> when its new exchanges began."""
    if not began:
        return
    rows = session.execute(
        select(SignalRow.exchange_id, SignalRow.session_id, SignalRow.at, SignalRow.evidence).where(
            SignalRow.session_id.in_(sorted(began)), SignalRow.kind == ABANDONMENT
        )
    ).all()
    wrong = [
        (exchange_id, ABANDONMENT)
        for exchange_id, name, at, evidence in rows
        if any(_began_at(evidence, at) < one <= at for one in began[name])
    ]
    if wrong:
        _delete(session, wrong)
        count(session, STAGE, WITHDRAWN, len(wrong))


def _delete(session: Session, keys: Collection[tuple[str, str]]) -> None:
    """Delete signals by exchange and kind."""
    session.execute(
        delete(SignalRow)
        .where(tuple_(SignalRow.exchange_id, SignalRow.kind).in_(keys))
        .execution_options(synchronize_session=False)
    )


def _began_at(evidence: object, at: float) -> float:
    """When the abandoned exchange began; damaged evidence gives the signal's own time."""
    found = evidence.get("began_at") if isinstance(evidence, dict) else None
    return found if isinstance(found, float) else at
