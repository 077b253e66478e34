"""Signals in the store: what clients and traffic tell of exchanges; abandoned sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Final

from sqlalchemy import ColumnElement, case, delete, func, literal, select, tuple_
from sqlalchemy.orm import Session

from ingest.feedback.deriving import Derived, first_of_each
from ingest.feedback.signals import Signal, SignalKind, draw_again
from ingest.grouping.features import DISCONTENT
from sidecar.store.database import Database, count, get_flag, insert_into, set_flag
from sidecar.store.models import ApiKeyRow, ChoiceRow, ExchangeRow, FeedbackRow, SignalRow

# Store signals, and take back abandonments that later records disprove.

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


def _began_at(evidence: Mapping[str, Any], at: float) -> float:  # Any: JSON
    """When the abandoned exchange began; of damaged evidence the signal's own time, so that the
    signal stays."""
    found = evidence.get("began_at")
    return found if isinstance(found, int | float) else at


SESSIONS: Final = ("session", "task")
"""Kinds of targets that are a session."""
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
    done: bool | None
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
class Annotations:
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


def annotations_of(session: Session, exchange_ids: Iterable[str]) -> dict[str, Annotations]:
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
            FeedbackRow.target_kind.in_(SESSIONS),
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
            **dict.fromkeys(SESSIONS, ("session", str(row.session_id))),
        }.get(row.target_kind, ("trace", row.project, row.target))
        by_name.setdefault(name, []).append(entry)
    signals: dict[str, list[SignalEntry]] = {}
    for signal in _signals(session, SignalRow.exchange_id.in_(sorted(keys))):
        signals.setdefault(signal.exchange_id, []).append(signal)
    return {
        exchange_id: Annotations(
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


def annotations_of_session(session: Session, session_id: str) -> Annotations:
    """Return what was told of a session, its exchanges and its traces."""
    rows = _feedback(session, FeedbackRow.session_id == session_id)
    found = _signals(session, SignalRow.session_id == session_id)
    return Annotations(_in_order(entry for _, entry in rows), tuple(found))


def voice() -> ColumnElement[str]:
    """Return whose opinion a row of feedback is: its key's, because a key may name any source. The
    source's where the key has the scope `voices`, and where no keys are asked for."""
    row, key = FeedbackRow, ApiKeyRow
    spoken_for = select(key.key_id).where((" " + key.scopes + " ").contains(" voices "))
    named = (row.key_id == "") | row.key_id.in_(spoken_for)
    return row.key_id + case((named, literal("/") + row.source), else_="")


def rank() -> ColumnElement[int]:
    """Return 1 for the row of its kind and target that the proxy received last from its voice.

    A session has several names: its own, its client's, its task's, those of its exchanges. It is
    one target.
    """
    row = FeedbackRow
    joined = row.target_kind.in_(SESSIONS) & row.session_id.is_not(None)
    target = case((joined, row.session_id), else_=row.target)
    target_kind = case((joined, literal("session")), else_=row.target_kind)
    return func.row_number().over(
        partition_by=(row.kind, target_kind, target, row.project, voice()),
        order_by=(row.received_at.desc(), row.feedback_id.desc()),
    )


def of_voice() -> ColumnElement[int]:
    """Return 1 for a session's row that came last from its voice, 2 for the one before."""
    order = (FeedbackRow.received_at.desc(), FeedbackRow.seq.desc())
    return func.row_number().over(partition_by=(FeedbackRow.session_id, voice()), order_by=order)


def _feedback(
    session: Session, *where: ColumnElement[bool]
) -> list[tuple[FeedbackRow, FeedbackEntry]]:
    """Read rows, those that count first, so that no voice keeps others out of the newest `MOST`."""
    place = rank().label("place")
    every = select(FeedbackRow, place).where(*where)
    statement = every.order_by(place, FeedbackRow.seq.desc()).limit(MOST)
    return [(row, _entry(row, counts=at == 1)) for row, at in session.execute(statement)]


def _signals(session: Session, where: ColumnElement[bool]) -> list[SignalEntry]:
    rows = session.scalars(select(SignalRow).where(where).limit(MOST))
    found = [
        SignalEntry(
            kind=row.kind,
            exchange_id=row.exchange_id,
            by_id=row.by_id,
            at=row.at,
            evidence=row.evidence,
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


# Find sessions that were left in the middle: nothing followed for a while.

FLAG = "abandonment_seq"
"""Flag row: the newest exchange that was looked at, by `exchange.seq`."""
PAGE = 500
"""Exchanges that one pass looks at."""
NEAR = 16
"""Exchanges of a session, before and behind in the order of storing, among which the next one is
looked for: proxies deliver out of order by seconds."""
CALLS = "tool_calls"


ABANDONED_AFTER_S = 1_800.0
"""A session that was left in the middle counts as abandoned when nothing followed for so long."""


def find_abandoned(database: Database, *, after_s: float, now: float) -> int:
    """Look at one page of exchanges. after_s: the window. now: Unix seconds.

    Returns: how many were looked at; fewer than `PAGE` when the pass has caught up.
    """
    with database.read() as session:
        begin = _number(get_flag(session, FLAG))
        page = _page(session, begin, settled=now - after_s, now=now)
        signals = _abandoned(session, page, after_s)
    if page:
        with database.write(alone=False) as session:
            save_signals(session, signals)
            set_flag(session, FLAG, str(page[-1].seq), now=now)
    return len(page)


def _page(session: Session, begin: int, *, settled: float, now: float) -> Sequence[Any]:
    rows = session.execute(
        select(
            ExchangeRow.seq,
            ExchangeRow.exchange_id,
            ExchangeRow.session_id,
            ExchangeRow.stored_at,
            ExchangeRow.started_at,
            ExchangeRow.timings,
            ExchangeRow.outcome,
            ExchangeRow.origin,
        )
        .where(ExchangeRow.seq > begin)
        .order_by(ExchangeRow.seq)
        .limit(PAGE)
    )
    # A time to come was written by a clock that was fast: nothing waits for it.
    return list(takewhile(lambda row: not settled < row.stored_at <= now, rows))


def _abandoned(session: Session, page: Sequence[Any], after_s: float) -> list[Signal]:
    names = [one.exchange_id for one in page]
    calls = set(
        session.scalars(
            select(ChoiceRow.exchange_id).where(
                ChoiceRow.exchange_id.in_(names), ChoiceRow.finish_reason == CALLS
            )
        )
    )
    began: dict[str, list[float]] = {}
    for one in page:
        began.setdefault(one.session_id, []).append(one.started_at)
    found: list[Signal] = []
    for one in page:
        cut = one.outcome == "cut"
        if (not cut and one.exchange_id not in calls) or one.origin != "user":
            continue
        ended_at = one.started_at + (one.timings.get("total_s") or 0.0)
        window = (one.started_at, ended_at + after_s)
        # Most are followed by another one of the page: no question is needed for them.
        if _any_within(began[one.session_id], window):
            continue
        if not _any_within(_near(session, one), window):
            found.append(
                Signal(
                    kind=ABANDONMENT,
                    exchange_id=one.exchange_id,
                    by_id=None,
                    session_id=one.session_id,
                    at=ended_at + after_s,
                    evidence={
                        "reason": "cut" if cut else "open_call",
                        "began_at": one.started_at,
                        "window_s": after_s,
                    },
                )
            )
    return found


def _near(session: Session, one: Any) -> Iterator[float]:
    """Yield when the nearest exchanges of the session began."""
    key = ExchangeRow.seq
    for bound, order in ((key > one.seq, key), (key < one.seq, key.desc())):
        # With both columns of its index stated, the rows are read in the order of the key.
        for held_out in (False, True):
            yield from session.scalars(
                select(ExchangeRow.started_at)
                .where(
                    ExchangeRow.session_id == one.session_id,
                    ExchangeRow.held_out == held_out,
                    bound,
                )
                .order_by(order)
                .limit(NEAR)
            )


def _any_within(times: Iterable[float], window: tuple[float, float]) -> bool:
    """Whether one of the times is after the window's beginning and not after its end."""
    begin, end = window
    return any(begin < at <= end for at in times)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
