"""Find and remove in the store what belongs to a target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, func, not_, or_, select, text, update
from sqlalchemy.orm import Session

from deploy.forgetting.target import Target
from deploy.registry import audit
from ingest.ruler.probe import SUBJECT
from ingest.store.forgotten import name_digest
from learner.runs.runs import abandon
from sidecar.records import BASE
from sidecar.store.database import Database, count
from sidecar.store.disk.traces import mark_replaced
from sidecar.store.models import (
    AdapterRow,
    DeadLetterRow,
    ExchangeRow,
    FeedbackRow,
    GroupDigestRow,
    JudgeCallRow,
    JudgeReplyRow,
    RunRow,
    SignalRow,
)
from sidecar.store.models.capture import IN_TRACE

STAGE = "forget"
PAGE = 100
"""Rows that are looked at without the write lock."""
ACTOR = "sidecar forget"


@dataclass(frozen=True, slots=True)
class Found:
    """An exchange of the target."""

    seq: int
    exchange_id: str
    session_key: str
    session_id: str
    trace_id: str
    stored_bytes: int
    """Size of its content, about."""


def exchanges_of(database: Database, target: Target) -> Iterator[list[Found]]:
    """Yield the exchanges of a target in pages, the oldest first. Reads through the table, without
    the write lock."""
    after = 0
    while True:
        with database.read() as session:
            rows = session.execute(
                select(
                    ExchangeRow.seq,
                    ExchangeRow.exchange_id,
                    ExchangeRow.session_key,
                    ExchangeRow.session_id,
                    ExchangeRow.trace_id,
                    func.length(ExchangeRow.request_body)
                    + func.length(ExchangeRow.prompt_token_ids)
                    + ExchangeRow.reply_bytes,
                )
                .where(ExchangeRow.seq > after, _is_of(target))
                .order_by(ExchangeRow.seq)
                .limit(PAGE)
            ).all()
        if not rows:
            return
        after = rows[-1].seq
        # A damaged size, or none, counts as nothing.
        yield [
            Found(seq, name, key, session_id, trace_id, size if isinstance(size, int) else 0)
            for seq, name, key, session_id, trace_id, size in rows
        ]


def callers_of(database: Database, target: Target) -> tuple[int, int]:
    """Return how many callers (key and user of a project) said what a target means, and in how many
    exchanges."""
    caller = ExchangeRow.project, ExchangeRow.key_id, ExchangeRow.user
    with database.read() as session:
        counts = session.execute(
            select(*caller, func.count()).where(_is_of(target)).group_by(*caller)
        ).all()
    return len(counts), sum(one[-1] for one in counts)


def _is_of(target: Target) -> ColumnElement[bool]:
    names = sorted(target.stored_names)
    if target.kind == "user":
        return ExchangeRow.user.in_(names)
    if target.kind == "exchange":
        return ExchangeRow.exchange_id.in_(names)
    return or_(ExchangeRow.session_id.in_(names), ExchangeRow.session_key.in_(names))


def end_runs(now: float) -> Callable[[Session, Sequence[str]], None]:
    """Return what ends training runs that learn from forgotten content: what they learned is not
    registered, and their other groups are given back."""

    def end(session: Session, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            abandon(session, run_id, "content that it learns from was forgotten", now=now)

    return end


def mark_digests(session: Session, target: Target) -> list[str]:
    """Mark what is left of the target's groups as forgotten.

    Returns: the runs that made an adapter of them, also of groups that an earlier call deleted.
    """
    digests = sorted({name_digest(target.kind, name) for name in target.stored_names})
    column = {
        "user": GroupDigestRow.user_digest,
        "session": GroupDigestRow.session_digest,
        "exchange": GroupDigestRow.exchange_id,
    }[target.kind]
    values = sorted(target.stored_names) if target.kind == "exchange" else digests
    rows = session.scalars(
        update(GroupDigestRow)
        .where(column.in_(values), column != "")
        .values(forgotten=True)
        .returning(GroupDigestRow.group_id)
        .execution_options(synchronize_session=False)
    ).all()
    runs: set[str] = set()
    for page in _pages(rows):
        found = select(GroupDigestRow.run_id).where(
            GroupDigestRow.group_id.in_(page), GroupDigestRow.status == "trained"
        )
        runs.update(session.scalars(found))
    return sorted(runs)


def learners_of(session: Session, run_ids: Sequence[str]) -> list[str]:
    """Name the adapters that these runs made, and all that continue one of them, oldest first."""
    if not run_ids:
        return []
    versions = session.execute(
        select(AdapterRow.name, AdapterRow.parent, AdapterRow.run_id).order_by(
            AdapterRow.created_at, AdapterRow.version
        )
    ).all()
    made: set[str] = set()
    for page in _pages(run_ids):
        # Of a run that came to weights which were known, the adapter that has them.
        made.update(
            name
            for name in session.scalars(select(RunRow.adapter).where(RunRow.run_id.in_(page)))
            if name is not None
        )
    runs = set(run_ids)
    learned: dict[str, None] = {}
    grown = -1
    while grown != len(learned):  # a child may be older than its parent by a wrong clock
        grown = len(learned)
        for name, parent, run_id in versions:
            if name in made or run_id in runs or (parent != BASE and parent in learned):
                learned[name] = None
    return list(learned)


def mark_adapters(session: Session, names: Sequence[str], *, now: float) -> int:
    """Mark these adapters, each once. Returns: how many were not marked before."""
    marked = 0
    for name in names:
        row = session.get(AdapterRow, name)
        if row is None or row.forgotten_at is not None:
            continue
        row.forgotten_at = now
        marked += 1
        audit.record(
            session,
            now=now,
            actor=ACTOR,
            action="adapter.forgotten",
            subject=name,
            before={},
            after={},
            reason="content was forgotten that it, or an adapter that it continues, learned from",
        )
    count(session, STAGE, "adapters", marked)
    return marked


def remove_dead_letters(database: Database, wanted: Callable[[bytes], bool]) -> int:
    """Delete those records that could not be stored; blank what the judge said in probes, and
    delete its kept replies about groups of calibrations: nothing tells whose content these showed.

    Returns: how many records were deleted.
    """
    after = removed = 0
    while True:
        with database.read() as session:
            rows = session.execute(
                select(DeadLetterRow.seq, DeadLetterRow.payload)
                .where(DeadLetterRow.seq > after)
                .order_by(DeadLetterRow.seq)
                .limit(PAGE)
            ).all()
        if not rows:
            break
        after = rows[-1].seq
        gone = [row.seq for row in rows if isinstance(row.payload, bytes) and wanted(row.payload)]
        if gone:
            with database.write() as session:
                for seq in gone:
                    session.delete(session.get_one(DeadLetterRow, seq))
                count(session, STAGE, "dead_letters", len(gone))
                mark_replaced(session)
            removed += len(gone)
    with database.write() as session:
        blanked = session.scalars(
            update(JudgeCallRow)
            .where(JudgeCallRow.group_id == SUBJECT, func.length(JudgeCallRow.reply) > 0)
            .values(reply="", error=None)
            .returning(JudgeCallRow.group_id)
            .execution_options(synchronize_session=False)
        ).all()
        calibrated = session.scalars(
            delete(JudgeReplyRow)
            .where(JudgeReplyRow.exchange_id == "")
            .returning(JudgeReplyRow.seq)
        ).all()
        if blanked or calibrated:
            mark_replaced(session)
    return removed


def own_names(database: Database, target: Target, found: Collection[Found]) -> set[str]:
    """Return the sessions and traces of these exchanges in which nobody else spoke."""
    sessions = sorted({one.session_id for one in found if one.session_id})
    traces = sorted({one.trace_id for one in found if one.trace_id})
    shared: set[str] = set()
    with database.read() as session:
        for page in _pages(sessions):
            others = select(ExchangeRow.session_id).where(
                ExchangeRow.session_id.in_(page), not_(_is_of(target))
            )
            shared.update(session.scalars(others.distinct()))
        for page in _pages(traces):
            others = select(ExchangeRow.trace_id).where(
                text(IN_TRACE), ExchangeRow.trace_id.in_(page), not_(_is_of(target))
            )
            shared.update(session.scalars(others.distinct()))
    return {*sessions, *traces} - shared


def remove_feedback(database: Database, target: Target, told: Collection[str]) -> int:
    """Delete what was told of exchanges, sessions and traces with these names, and what the user
    told of others. The rest goes with its exchange.

    Returns: how many were deleted.
    """
    removed = 0
    for page in _pages(sorted(told)):
        with database.write() as session:
            gone = session.scalars(
                delete(FeedbackRow)
                .where(or_(FeedbackRow.target.in_(page), FeedbackRow.session_id.in_(page)))
                .returning(FeedbackRow.seq)
            ).all()
            count(session, STAGE, "feedback", len(gone))
            removed += len(gone)
            signals = session.scalars(
                delete(SignalRow).where(SignalRow.session_id.in_(page)).returning(SignalRow.kind)
            ).all()
            if gone or signals:
                mark_replaced(session)
    if target.kind == "user":
        removed += _remove_told_by(database, sorted(target.sources))
    return removed


def _remove_told_by(database: Database, names: Sequence[str]) -> int:
    after = removed = 0
    while True:
        with database.read() as session:
            seqs = session.scalars(
                select(FeedbackRow.seq)
                .where(FeedbackRow.seq > after, FeedbackRow.source.in_(names))
                .order_by(FeedbackRow.seq)
                .limit(PAGE)
            ).all()
        if not seqs:
            return removed
        after = seqs[-1]
        with database.write() as session:
            session.execute(delete(FeedbackRow).where(FeedbackRow.seq.in_(seqs)))
            count(session, STAGE, "feedback", len(seqs))
            removed += len(seqs)
            mark_replaced(session)


def _pages(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), PAGE):
        yield names[start : start + PAGE]
