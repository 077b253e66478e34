"""Store feedback and join it to its exchange, whichever of the two comes first.

Feedback is joined only to exchanges of its own project. What names another project's exchange, or
one that never comes, stays in the table and counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from ingest.feedback.signals import (
    Signal,
    Turn,
    between,
    draw_again,
    draw_session_again,
    tool_error,
    turn_of,
)
from ingest.sessions.messages import Family, Kin
from ingest.sessions.rows import conversation_of
from ingest.store.exchanges import (
    StoredExchange,
    decoded_columns,
    decoded_sizes,
    pages_of,
    read_pages,
)
from ingest.store.sessions import forgotten_feedback
from sidecar.feedback import Feedback
from sidecar.routing.session_key import NAMED
from sidecar.store.database import count, insert_into
from sidecar.store.models import IN_TASK, IN_TRACE, NAMED_OTHERWISE, ExchangeRow, FeedbackRow

# Derive signals from exchanges as they are placed in their sessions.


@dataclass(frozen=True, slots=True)
class Placed:
    """An exchange with its kin, and by which rule it says that a tool failed."""

    stored: StoredExchange
    kin: Kin
    tool_error: str | None


@dataclass(frozen=True, slots=True)
class Derived:
    """What a batch shows."""

    signals: tuple[Signal, ...] = ()
    regrouped: tuple[Family, ...] = ()
    """Families that moves have changed: `signals` has all that they show, and what else is stored
    of them is wrong."""


def derive(session: Session, placed: Sequence[Placed], regrouped: Sequence[Family]) -> Derived:
    """Return what exchanges that are placed now show, and families whose members have moved.

    session: may be a reader's. placed: with their siblings, after the whole batch has
        sessions.
    Most exchanges have no siblings and no failed tool: nothing is read for them.
    """
    known = {one.stored.exchange.exchange_id: one.stored for one in placed}
    rules = {one.stored.exchange.exchange_id: one.tool_error for one in placed}
    wanted = {name for one in placed for name in one.kin.siblings}
    wanted.update(name for family in regrouped for name in family.children)
    for stored in _load(session, wanted - known.keys()):
        known[stored.exchange.exchange_id] = stored
    families = dict.fromkeys(regrouped)
    for one in placed:
        own = one.stored.exchange.exchange_id
        if one.kin.siblings or one.tool_error is not None:
            beside = tuple(sorted((own, *one.kin.siblings)))
            families[Family(one.kin.session, one.kin.parent, beside)] = None
    unread = {name for family in regrouped for name in family.children} - rules.keys()
    rules.update((name, _tool_error(known[name])) for name in unread if name in known)
    turns: dict[str, Turn] = {}
    found: list[Signal] = []
    for family in families:
        found += _shown_by(family, known, rules, turns)
    return Derived(tuple(found), tuple(regrouped))


def first_of_each(signals: Iterable[Signal]) -> list[Signal]:
    """Keep of each exchange and kind the signal that showed first; sorted."""
    kept: dict[tuple[str, str], Signal] = {}
    for signal in sorted(signals, key=lambda one: (one.at, one.by_id or "")):
        kept.setdefault((signal.exchange_id, signal.kind), signal)
    return [kept[key] for key in sorted(kept)]


def _shown_by(
    family: Family,
    known: Mapping[str, StoredExchange],
    rules: Mapping[str, str | None],
    turns: dict[str, Turn],
) -> list[Signal]:
    """Return what a family shows about its parent and about each other.

    rules: why members say that a tool failed, but for those that said it when they were stored.
    turns: members that are read already; others are added.
    """
    found: list[Signal] = []
    members = [name for name in family.children if name in known]
    """Without what another consumer has not stored yet, and what is damaged."""
    if family.parent is not None:
        for name in members:
            rule = rules.get(name)
            if rule is not None:
                found.append(_failed(known[name], family.parent, rule, session_id=family.session))
    if len(members) > 1:
        for name in members:
            if name not in turns:
                # The place in memory is newer than that of `known`: it may have moved just now.
                turns[name] = turn_of(known[name].exchange, session_id=family.session)
        found += between([turns[name] for name in members], first=family.parent is None)
    return found


def _failed(stored: StoredExchange, parent: str, rule: str, *, session_id: str) -> Signal:
    exchange = stored.exchange
    return Signal(
        kind="tool_error",
        exchange_id=parent,
        by_id=exchange.exchange_id,
        session_id=session_id,
        at=exchange.timings.started_at,
        evidence={"rule": rule},
    )


def _tool_error(stored: StoredExchange) -> str | None:
    return tool_error(conversation_of(stored.exchange.request).messages)


def _load(session: Session, names: Collection[str]) -> list[StoredExchange]:
    if not names:
        return []
    rows = session.execute(
        select(ExchangeRow.seq, *decoded_columns())
        .where(ExchangeRow.exchange_id.in_(sorted(names)))
        .order_by(ExchangeRow.seq)
    ).all()
    sizes = ((seq, sum(decoded_sizes(*columns))) for seq, *columns in rows)
    return [stored for page, _ in read_pages(session, pages_of(sizes)) for stored in page]


STAGE = "feedback"
"""Stage of the counters of this module."""
STORED, REPEATED, CONFLICT = "stored_", "repeated", "conflict"
JOINED, OTHER_PROJECT = "joined", "other_project"
FORGOTTEN = "forgotten"
"""Reasons of the counters; `STORED` is followed by the kind."""
_FIELDS = tuple(name for name in Feedback.__struct_fields__ if name != "received_at")
"""Two deliveries under one idempotency key differ in the time at which they were received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An exchange that was stored just now."""

    exchange_id: str
    session_id: str
    session_key: str
    trace_id: str
    task: str
    project: str

    @property
    def names(self) -> tuple[str, ...]:
        """What feedback may name it by."""
        named = self.session_key if self.session_key.startswith(NAMED) else ""
        found = (self.exchange_id, self.session_id, named, self.trace_id, self.task)
        return tuple(name for name in found if name)


_NAMES = tuple(Arrived.__dataclass_fields__)
_ARRIVED = tuple(getattr(ExchangeRow, name) for name in _NAMES)
MOST_OF_TASK = 1_000
"""Exchanges of a task among which its newest session is looked for."""


def save_feedback(session: Session, records: Sequence[Feedback], *, now: float) -> list[Feedback]:
    """Store feedback and join what names an exchange that is stored. Counts each once.

    In the caller's write transaction, which must be alone, so that no exchange is stored meanwhile.
    What names a forgotten exchange or session is counted alone. An exchange that gets a negative
    score is drawn again, and so are those of a session that does.
    Returns: what is not stored, because its id has another content: the client used an idempotency
        key twice.
    """
    if not records:
        return []
    gone = forgotten_feedback(session, records)
    stored = _stored(session, [record.feedback_id for record in records])
    fresh: dict[str, Feedback] = {}
    conflicts: list[Feedback] = []
    counts: Counter[str] = Counter()
    negative: set[str] = set()
    sessions: set[str] = set()
    for record in records:
        if record.feedback_id in gone:
            counts[FORGOTTEN] += 1
            continue
        content = _content(record)
        known = stored.setdefault(record.feedback_id, content)
        if known is content:
            fresh[record.feedback_id] = record
        elif known == content:
            counts[REPEATED] += 1
        else:
            counts[CONFLICT] += 1
            conflicts.append(record)
    for record in fresh.values():
        found = _find(session, record)
        joined = found is not None and found.project == record.project
        counts[STORED + record.kind] += 1
        counts[JOINED] += joined
        counts[OTHER_PROJECT] += found is not None and not joined
        values = msgspec.structs.asdict(record)
        for name in ("exchange_id", "session_id"):
            values[name] = getattr(found, name) if joined else None
        session.execute(insert_into(session, FeedbackRow).values(**values, stored_at=now))
        if found is None or not joined or record.score is None or record.score >= 0:
            continue
        if record.target_kind == "exchange":
            negative.add(found.exchange_id)
        else:
            sessions.add(found.session_id)
    draw_again(session, negative)
    for name in sorted(sessions):
        draw_session_again(session, name)
    _count(session, counts)
    return conflicts


def join_waiting(session: Session, arrived: Sequence[Arrived]) -> None:
    """Join feedback that came before its exchange. In the transaction that stored the exchanges,
    before their moves are stored (`ingest.store.sessions.save_moves`)."""
    by_name: dict[str, list[Arrived]] = {}
    for one in arrived:
        for name in one.names:
            by_name.setdefault(name, []).append(one)
    if not by_name:
        return
    waiting = session.execute(
        select(
            FeedbackRow.seq,
            FeedbackRow.target_kind,
            FeedbackRow.target,
            FeedbackRow.project,
            FeedbackRow.received_at,
        ).where(FeedbackRow.target.in_(sorted(by_name)), FeedbackRow.exchange_id.is_(None))
    ).all()
    counts: Counter[str] = Counter()
    for seq, kind, target, project, received_at in waiting:
        candidates = [one for one in by_name[target] if _is_named(one, kind, target)]
        own = next((one for one in candidates if one.project == project), None)
        if own is None:
            counts[OTHER_PROJECT] += bool(candidates)
            continue
        if kind == "task" and (own := _of_task(session, target, project, received_at)) is None:
            continue
        counts[JOINED] += 1
        session.execute(
            update(FeedbackRow)
            .where(FeedbackRow.seq == seq)
            .values(exchange_id=own.exchange_id, session_id=own.session_id)
            .execution_options(synchronize_session=False)
        )
    _count(session, counts)


def _is_named(one: Arrived, kind: str, target: str) -> bool:
    if kind == "exchange":
        return one.exchange_id == target
    if kind == "trace":
        return one.trace_id == target
    if kind == "task":
        return one.task == target
    return target in (one.session_id, one.exchange_id, one.session_key)


def _stored(session: Session, ids: Iterable[str]) -> dict[str, tuple[object, ...]]:
    columns = [getattr(FeedbackRow, name) for name in _FIELDS]
    rows = session.execute(select(*columns).where(FeedbackRow.feedback_id.in_(sorted(set(ids)))))
    return {row[_FIELDS.index("feedback_id")]: tuple(row) for row in rows}


def _content(record: Feedback) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in _FIELDS)


def _find(session: Session, record: Feedback) -> Arrived | None:
    """Return a stored exchange that the feedback names; of its own project if there is one."""
    target = record.target
    if record.target_kind == "task":
        return _of_task(session, target, record.project, record.received_at)
    statement = select(*_ARRIVED).limit(1)
    if record.target_kind == "trace":
        of_trace = statement.where(text(IN_TRACE), ExchangeRow.trace_id == target)
        row = session.execute(of_trace.where(ExchangeRow.project == record.project)).first()
    elif record.target_kind == "exchange" or not target.startswith(NAMED):
        # A session that no client named has the id of its first exchange, wherever that is now.
        row = session.execute(statement.where(ExchangeRow.exchange_id == target)).first()
    else:
        row = session.execute(statement.where(ExchangeRow.session_id == target)).first()
        if row is None:  # the client's name for a part of a session that has another name
            otherwise = statement.where(text(NAMED_OTHERWISE), ExchangeRow.session_key == target)
            row = session.execute(otherwise).first()
    return None if row is None else Arrived(**row._mapping)


def _of_task(session: Session, task: str, project: str, received_at: float) -> Arrived | None:
    """Return an exchange of the session of a task that began last of those that had begun by
    `received_at` (Unix seconds); of the newest `MOST_OF_TASK` exchanges."""
    rows = session.execute(
        select(*_ARRIVED, ExchangeRow.started_at)
        .where(
            text(IN_TASK),
            ExchangeRow.task == task,
            ExchangeRow.project == project,
            ExchangeRow.origin == "user",  # an attempt's outcome is its runner's to tell
            ExchangeRow.started_at <= received_at,
        )
        .order_by(ExchangeRow.seq.desc())
        .limit(MOST_OF_TASK)
    ).all()
    began: dict[str, float] = {}
    for row in rows:
        began[row.session_id] = min(row.started_at, began.get(row.session_id, row.started_at))
    newest = max(rows, key=lambda row: began[row.session_id], default=None)
    return None if newest is None else Arrived(**{n: getattr(newest, n) for n in _NAMES})


def _count(session: Session, counts: Counter[str]) -> None:
    for reason, number in counts.items():
        count(session, STAGE, reason, number)
