"""Delete exchanges with all that belongs to them: replies, group, answers, what the judge said,
scores.

What stays of a group that a training run had is a digest (`group_digest`), so the lineage of its
adapter can still be told. Exchanges that are stored as a difference from a deleted one are encoded
anew before, outside the write lock (`prepare`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from sqlalchemy import ColumnElement, case, delete, func, select, text, update
from sqlalchemy.orm import Session

from ingest.grouping.selection import BACKLOG, group_id_of
from ingest.retention.tasks import claimed_tasks, digest_of, end_tasks
from ingest.store.bases import Heirs, children_of, encode_children, store_children
from ingest.store.exchanges import NEW
from ingest.store.groups import CLAIMED
from sidecar.store.codec import decompress, decompress_array
from sidecar.store.contents import content_cache, load_contents, load_links, opened_reply
from sidecar.store.database import DAMAGE, Database, count, insert_into
from sidecar.store.models import (
    IN_TASK,
    AnswerRow,
    BestOfScoreRow,
    ChoiceRow,
    DeadLetterRow,
    ExchangeRow,
    FeedbackRow,
    GateComparisonRow,
    GroupDigestRow,
    GroupRow,
    JudgeCallRow,
    JudgeReplyRow,
    RehearsalRow,
    RunRow,
    SignalRow,
    WatchedAnswerRow,
)
from sidecar.store.traces import mark_replaced

STAGE = "retention"
"""Counter rows: (stage, kind of record) -> rows that were deleted because of age or size."""
FORGET_STAGE = "forget"
"""The same, of `sidecar forget`."""
SELECTION_STAGE = "selection"
DELETED_GROUPS = "deleted_groups"
"""Counter rows: (stage, status) -> groups that were deleted in it."""
REBASED = 16
REBASED_BYTES = 2**20
"""Exchanges, and their decoded bytes, that one transaction encodes anew."""
Why = Literal["expired", "forgotten"]
Release = Callable[[Session, Sequence[str]], None]
"""Ends these training runs, in the caller's transaction."""


@dataclass(slots=True)
class Deleted:
    """What one transaction deleted."""

    exchanges: int = 0
    rebased: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    """By status; `task_` and the status of groups of whole sessions."""
    runs: set[str] = field(default_factory=set)
    """Training runs that had one of the groups."""
    held: set[str] = field(default_factory=set)
    """Exchanges that stay because a training run has their group now."""
    locked: set[str] = field(default_factory=set)
    """Exchanges that stay because others, which stay too, are stored as a difference from them and
    are encrypted with a key that is missing: without them nobody could read these again."""


def delete_exchanges(
    database: Database,
    exchange_ids: Sequence[str],
    *,
    why: Why,
    now: float,
    release: Release | None = None,
) -> Deleted:
    """Delete exchanges as `deletion_steps`, without a pause.

    Raises: StoreError.
    """
    steps = list(deletion_steps(database, exchange_ids, why=why, now=now, release=release))
    steps[-1].rebased = sum(one.rebased for one in steps)
    return steps[-1]


def deletion_steps(
    database: Database,
    exchange_ids: Sequence[str],
    *,
    why: Why,
    now: float,
    release: Release | None = None,
) -> Iterator[Deleted]:
    """Delete exchanges and what belongs to them, in one transaction, and before it in as many as it
    takes to encode anew what is stored as a difference from them.

    release: None: exchanges whose group a training run has now stay.
    Yields: after each transaction, what it did; the last one deletes. Who stops before loses
        nothing, and may begin again. Raises: StoreError.
    """
    gone = list(exchange_ids)
    locked: set[str] = set()
    heirs: Heirs = {}
    while True:
        with database.read() as session:
            rebased = encode_children(
                session, gone, heirs, limit=REBASED, limit_bytes=REBASED_BYTES
            )
            if rebased.locked:
                needed = load_links(session, sorted(rebased.locked)).keys() & set(gone)
                locked |= needed
                gone = [one for one in gone if one not in needed]
                heirs.clear()
                continue
            last = len(rebased.rows) < REBASED
            contents = _content_digests(session, gone) if last else {}
        with database.write() as session:
            done = Deleted(rebased=store_children(session, rebased, gone), locked=locked)
            mark_replaced(session)  # SQLite may have moved what goes, and left a copy
            # Others may have come since, and some are left when there were many.
            deleted = last and not children_of(session, gone, limit=1)
            if deleted:
                _delete(session, gone, contents, done, why, release, now=now)
        yield done
        if deleted:
            return


def _delete(
    session: Session,
    exchange_ids: Sequence[str],
    contents: dict[str, str],
    done: Deleted,
    why: Why,
    release: Release | None,
    *,
    now: float,
) -> None:
    own = session.scalars(select(GroupRow).where(GroupRow.exchange_id.in_(exchange_ids))).all()
    lent = _groups_with_answers_of(session, exchange_ids)
    groups = list({row.group_id: row for row in (*own, *(row for row, _ in lent))}.values())
    claimed = [row for row in groups if row.status == CLAIMED]
    tasks = claimed_tasks(session, exchange_ids)
    if release is not None and (claimed or tasks):
        runs = {row.run_id for row in claimed if row.run_id is not None} | {*tasks.values()} - {""}
        release(session, sorted(runs))
        session.flush()
        for row in claimed:
            session.refresh(row)
    elif claimed or tasks:
        done.held = {row.exchange_id for row in claimed}
        done.held |= {source for row, source in lent if row.status == CLAIMED} | tasks.keys()
        groups = [row for row in groups if row.status != CLAIMED]
    gone = [one for one in exchange_ids if one not in done.held]
    for task in end_tasks(session, gone, why, now=now):
        done.groups[f"task_{task.status}"] += 1
        if task.status == "trained" and task.run_id is not None:
            done.runs.add(task.run_id)
    _keep_digests(session, groups, contents, done, forgotten=why == "forgotten", now=now)
    names = [row.group_id for row in groups]
    # The judge's words about best-of-N answers that never became a group have the id of one.
    judged = sorted({*names, *map(group_id_of, gone)})
    session.execute(delete(JudgeCallRow).where(JudgeCallRow.group_id.in_(judged)))
    if names:
        session.execute(delete(AnswerRow).where(AnswerRow.group_id.in_(names)))
        session.execute(delete(GroupRow).where(GroupRow.group_id.in_(names)))
    blank_comparisons(session, gone)
    if why == "forgotten":
        session.execute(delete(SignalRow).where(SignalRow.by_id.in_(gone)))
    session.execute(delete(RehearsalRow).where(RehearsalRow.task.in_(gone)))
    _count_undecided(session, gone, why)
    session.execute(delete(JudgeReplyRow).where(JudgeReplyRow.exchange_id.in_(gone)))
    for table in (BestOfScoreRow, FeedbackRow, SignalRow, WatchedAnswerRow, ChoiceRow, ExchangeRow):
        where = table.exchange_id.in_(gone)
        removed = session.scalars(delete(table).where(where).returning(table.exchange_id)).all()
        if table is ExchangeRow:
            done.exchanges = len(removed)
    for row in groups:
        done.groups[row.status] += 1
        count(session, DELETED_GROUPS, row.status)
        if row.status == "trained" and row.run_id is not None:
            done.runs.add(row.run_id)
    stage = STAGE if why == "expired" else FORGET_STAGE
    count(session, stage, "exchanges", done.exchanges)
    count(session, stage, "groups", len(groups))
    cache = content_cache(session)
    for one in gone:
        cache.drop(one)


def _groups_with_answers_of(
    session: Session, exchange_ids: Sequence[str]
) -> list[tuple[GroupRow, str]]:
    """Return groups of other exchanges that hold answers of these, each with the one of them."""
    rows = session.execute(
        select(GroupRow, AnswerRow.exchange_id)
        .join(AnswerRow, AnswerRow.group_id == GroupRow.group_id)
        .where(AnswerRow.exchange_id.in_(exchange_ids))
    )
    return [(row, source) for row, source in rows if source is not None]


def _keep_digests(
    session: Session,
    groups: Iterable[GroupRow],
    contents: dict[str, str],
    done: Deleted,
    *,
    forgotten: bool,
    now: float,
) -> None:
    kept = [row for row in groups if row.run_id is not None]
    # The lineage tells of runs that made an adapter; the groups that others refused are not kept.
    runs = select(RunRow.run_id).where(
        RunRow.run_id.in_({row.run_id for row in kept}), RunRow.adapter.is_not(None)
    )
    made = set(session.scalars(runs)) if kept else set()
    kept = [row for row in kept if row.run_id in made]
    if not kept:
        return
    names = {
        one: (session_id, user)
        for one, session_id, user in session.execute(
            select(ExchangeRow.exchange_id, ExchangeRow.session_id, ExchangeRow.user).where(
                ExchangeRow.exchange_id.in_([row.exchange_id for row in kept])
            )
        )
    }
    scores: dict[str, list[Any]] = {row.group_id: [] for row in kept}
    rewards: dict[str, list[Any]] = {row.group_id: [] for row in kept}
    for group_id, score, reward in session.execute(
        select(AnswerRow.group_id, AnswerRow.score, AnswerRow.reward)
        .where(AnswerRow.group_id.in_(scores))
        .order_by(AnswerRow.group_id, AnswerRow.index)
    ):
        scores[group_id].append(score)
        rewards[group_id].append(reward)
    rows = []
    for row in kept:
        session_id, user = names.get(row.exchange_id, (row.session_id, ""))
        more = {
            "exchange_id": row.exchange_id,
            "content_digest": contents.get(row.exchange_id, ""),
            "scores": scores[row.group_id],
            "rewards": rewards[row.group_id] if row.reward_rule is not None else None,
        }
        rows.append(digest_of(row, session_id, user, forgotten=forgotten, now=now) | more)
    session.execute(insert_into(session, GroupDigestRow).on_conflict_do_nothing(), rows)


def blank_comparisons(session: Session, exchange_ids: Sequence[str]) -> int:
    """Remove what was said from the gate's comparisons of these exchanges.

    What the gate counts stays: scores, adapters, which answers were cut short; and who judged.
    Returns: the number of comparisons.
    """
    rows = session.scalars(
        select(GateComparisonRow).where(GateComparisonRow.exchange_id.in_(exchange_ids))
    ).all()
    for row in rows:
        row.answers = [_blank(one) for one in row.answers]
        session.execute(
            update(JudgeCallRow)
            .where(JudgeCallRow.group_id == row.comparison_id)
            .values(reply="", error=None)
            .execution_options(synchronize_session=False)
        )
    session.flush()
    return len(rows)


def _blank(answer: dict[str, Any]) -> dict[str, Any]:
    kept = ("arm", "adapter", "finish_reason", "short", "score", "disagreement")
    known = {name: answer[name] for name in kept if name in answer}
    return {**known, "content": "", "tool_calls": [], "explanation": ""}


def _count_undecided(session: Session, exchange_ids: Sequence[str], why: Why) -> None:
    """An exchange that selection had not decided is decided by its end."""
    for selection in session.scalars(
        select(ExchangeRow.selection).where(ExchangeRow.exchange_id.in_(exchange_ids))
    ):
        if selection in (NEW, BACKLOG):
            count(session, SELECTION_STAGE, why)
        if selection == BACKLOG:
            count(session, SELECTION_STAGE, BACKLOG, -1)


def _content_digests(session: Session, exchange_ids: Sequence[str]) -> dict[str, str]:
    """Digest prompt and answers of those exchanges whose group a training run had."""
    rows = session.execute(
        select(GroupRow.exchange_id, GroupRow.group_id).where(
            GroupRow.exchange_id.in_(exchange_ids), GroupRow.run_id.is_not(None)
        )
    )
    groups = {row.exchange_id: row.group_id for row in rows}
    if not groups:
        return {}
    prompts = load_contents(session, list(groups)).found
    answers: dict[str, list[tuple[bytes, bytes]]] = {}
    for row in session.scalars(
        select(AnswerRow)
        .where(AnswerRow.group_id.in_(groups.values()))
        .order_by(AnswerRow.group_id, AnswerRow.index)
    ):
        answers.setdefault(row.group_id, []).append(
            (_decoded(session, row, "message_body"), _decoded(session, row, "token_ids"))
        )
    found = {}
    for exchange_id, group_id in groups.items():
        if (content := prompts.get(exchange_id)) is None:
            continue  # damaged
        digest = hashlib.sha256(content.request)
        digest.update(content.prompt_ids)
        for message, ids in answers.get(group_id, ()):
            digest.update(message)
            digest.update(ids)
        found[exchange_id] = digest.hexdigest()
    return found


def _decoded(
    session: Session, row: AnswerRow, column: Literal["message_body", "token_ids"]
) -> bytes:
    """Return what was said in a column; a damaged or locked one as it is stored."""
    try:
        stored = opened_reply(session, row, column)
        return decompress(stored) if column == "message_body" else decompress_array(stored)
    except DAMAGE:
        return row.message_body if column == "message_body" else row.token_ids


def remove_leftovers(session: Session, exchange_ids: Sequence[str]) -> None:
    """Delete what came before exchanges that are not stored: what the judge said about best-of-N
    answers, and feedback."""
    judged = [group_id_of(one) for one in exchange_ids]
    session.execute(delete(JudgeCallRow).where(JudgeCallRow.group_id.in_(judged)))
    session.execute(delete(BestOfScoreRow).where(BestOfScoreRow.exchange_id.in_(exchange_ids)))
    told = session.scalars(
        delete(FeedbackRow).where(FeedbackRow.target.in_(exchange_ids)).returning(FeedbackRow.seq)
    ).all()
    count(session, FORGET_STAGE, "feedback", len(told))


# Which exchanges go next, by age and by the size of the store. Pure.

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An exchange that the store holds."""

    seq: int
    exchange_id: str
    stored_at: float
    stored_bytes: int
    """Size of its content, about."""
    group_status: str | None
    """None: it has no group."""


def too_old(
    held: Sequence[Held], *, exchanges_s: float | None, groups_s: float | None, now: float
) -> list[Held]:
    """Choose exchanges by their age. One with a group goes with it, by the age of groups. What a
    training run has now stays. exchanges_s, groups_s: how long they stay; None: for good."""
    chosen = []
    for one in held:
        age_s = exchanges_s if one.group_status is None else groups_s
        if age_s is not None and one.stored_at < now - age_s and one.group_status != CLAIMED:
            chosen.append(one)
    return chosen


def too_much(held: Iterable[Held], *, excess_bytes: int) -> list[Held]:
    """Choose the first ones, whatever their age, until they have so many bytes. What a training run
    has now stays."""
    chosen = []
    for one in held:
        if excess_bytes > 0 and one.group_status != CLAIMED:
            chosen.append(one)
            excess_bytes -= one.stored_bytes
    return chosen


def divide(sizes: Iterable[tuple[Key, int]], rows: int, limit_bytes: int) -> list[list[Key]]:
    """Divide keys, each with its bytes, into parts of so many rows and bytes at most; one key that
    has more bytes is a part."""
    found: list[list[Key]] = []
    total = 0
    for key, size in sizes:
        if not found or len(found[-1]) >= rows or total + size > limit_bytes:
            found.append([])
            total = 0
        found[-1].append(key)
        total += size
    return found


# Read the rows that retention looks at, a page at a time, in the order of `seq`.

PAGE: Final = 200
"""Rows that are looked at in one step, without the write lock."""
OF_A_COMPARISON: Final = "c-"
"""Beginning of `judge_call.group_id` when the gate asked."""


def held_after(session: Session, after: int) -> list[Held]:
    """Read exchanges behind a row, with their sizes and the state of their group."""
    replies = (
        select(func.sum(_lengths(ChoiceRow)))
        .where(ChoiceRow.exchange_id == ExchangeRow.exchange_id)
        .scalar_subquery()
    )
    answers = (
        # What verifiers found is stored as ASCII, so characters are bytes.
        select(func.sum(_lengths(AnswerRow) + func.coalesce(func.length(AnswerRow.checks), 0)))
        .where(AnswerRow.group_id == GroupRow.group_id)
        .scalar_subquery()
    )
    rows = session.execute(
        select(
            ExchangeRow.seq,
            ExchangeRow.exchange_id,
            ExchangeRow.stored_at,
            func.length(ExchangeRow.request_body) + func.length(ExchangeRow.prompt_token_ids),
            replies,
            answers,
            GroupRow.status,
        )
        .outerjoin(GroupRow, GroupRow.exchange_id == ExchangeRow.exchange_id)
        .where(ExchangeRow.seq > after)
        .order_by(ExchangeRow.seq)
        .limit(PAGE)
    )
    return [
        Held(
            seq=seq,
            exchange_id=exchange_id,
            stored_at=stored_at,
            stored_bytes=sum(size or 0 for size in sizes),
            group_status=status,
        )
        for seq, exchange_id, stored_at, *sizes, status in rows
    ]


def rehearsals_of(session: Session, exchange_ids: Sequence[str]) -> list[str]:
    """Return the exchanges of rehearsals of the tasks that begin with these exchanges."""
    row = ExchangeRow
    found = select(row.exchange_id).where(
        text(IN_TASK), row.task.in_(exchange_ids), row.origin == "rehearsal"
    )
    return list(session.scalars(found))


def judge_calls_after(session: Session, after: int) -> Sequence[Any]:
    """Read replies of the judge behind a row."""
    row = JudgeCallRow
    # Of the others the reply is not read: it may be long.
    said = case((row.group_id.startswith(OF_A_COMPARISON), row.reply != ""), else_=True)
    return _after(session, after, row.seq, row.group_id, row.at, said.label("said"))


def feedback_after(session: Session, after: int) -> Sequence[Any]:
    """Read feedback behind a row."""
    row = FeedbackRow
    return _after(session, after, row.seq, row.exchange_id, row.stored_at)


def dead_letters_after(session: Session, after: int) -> Sequence[Any]:
    """Read dead letters behind a row, without what they say."""
    row = DeadLetterRow
    return _after(session, after, row.seq, row.at, func.length(row.payload).label("size"))


def _after(session: Session, after: int, seq: Any, *columns: Any) -> Sequence[Any]:
    page = select(seq, *columns).where(seq > after).order_by(seq).limit(PAGE)
    return session.execute(page).all()


def _lengths(table: type[ChoiceRow] | type[AnswerRow]) -> ColumnElement[int]:
    columns = (table.message_body, table.token_ids, table.logprobs)
    first, second, third = (func.length(column) for column in columns)
    return first + second + third
