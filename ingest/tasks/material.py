"""Read the sessions of a task group as rows of tokens, for the learner.

A token is trained on when its answer is exact (`ingest.grouping.selection.exact_answers`, as for
the answers of any group), stands in the main conversation of its session, and no other run has
learned from its step. Everything else is context: sub-agents, retries, branches that were given up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.grouping.selection import Rules, exact_answers
from ingest.sessions.rows import TokenRow, TokenTurn, join_rows, parents_first
from ingest.store.exchanges import (
    StoredExchange,
    decoded_columns,
    decoded_sizes,
    pages_of,
    read_pages,
    token_turn,
)
from ingest.store.groups import CLAIMED
from ingest.trajectories.recorded import STEP_COLUMNS, main_line, step_of
from sidecar.store.codec import ID_BYTES
from sidecar.store.models import AnswerRow, ExchangeRow, GroupRow, TaskGroupRow, TaskMemberRow

TRAINED = "trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSession:
    """A finished session, as one attempt at a task."""

    session_id: str
    reward: float
    """Unitless, 0..1."""
    source: str
    """What the reward rests on: outcome | ruler | mixed."""
    exchange_ids: tuple[str, ...]
    rows: tuple[TokenRow, ...]
    steps: Mapping[str, float]
    """Exchange whose answers are trained on -> the temperature that sampled them, above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroup:
    """Attempts at one task by one adapter version (ingest -> learner)."""

    group_id: str
    key_kind: str
    adapter: str
    """vLLM name of the LoRA that sampled every answer; "base" when none did."""
    judge_model: str
    """Empty: outcomes alone are the rewards."""
    rubric_hash: str
    sessions: tuple[TaskSession, ...]


class TooLongError(ValueError):
    """A session has more tokens than may be read."""


def load_task_group(
    session: Session,
    group_id: str,
    rules: Rules,
    *,
    run_id: str | None,
    most_tokens: int,
    known: Mapping[str, Collection[str]] | None = None,
) -> TaskGroup | None:
    """Read a group with its sessions.

    run_id: the run that asks: steps of answer groups that other runs have are context.
    known: session id -> the steps that a run has trained on, to be found again; None: it asks now.
    most_tokens: prompt tokens of the exchanges of one session, together.
    Returns: None when it has no rewards, or is gone.
    Raises: TooLongError; one of `sidecar.store.database.DAMAGE`.
    """
    group = session.scalar(select(TaskGroupRow).where(TaskGroupRow.group_id == group_id))
    members = session.scalars(
        select(TaskMemberRow)
        .where(TaskMemberRow.group_id == group_id)
        .order_by(TaskMemberRow.place)
    ).all()
    if group is None or len(members) < 2 or any(one.reward is None for one in members):
        return None
    return TaskGroup(
        group_id=group_id,
        key_kind=group.key_kind,
        adapter=group.adapter,
        judge_model=group.judge_model or "",
        rubric_hash=group.rubric_hash or "",
        sessions=tuple(
            _load(
                session,
                one,
                group.adapter,
                rules,
                run_id=run_id,
                most_tokens=most_tokens,
                known=None if known is None else known.get(one.session_id, ()),
            )
            for one in members
        ),
    )


def _load(
    session: Session,
    member: TaskMemberRow,
    adapter: str,
    rules: Rules,
    *,
    run_id: str | None,
    most_tokens: int,
    known: Collection[str] | None,
) -> TaskSession:
    ids = [str(one) for one in member.exchange_ids or ()]
    row = ExchangeRow
    found = session.execute(
        select(row.seq, *STEP_COLUMNS, *decoded_columns())
        .where(row.exchange_id.in_(ids))
        .order_by(row.seq)
    ).all()
    steps = [step_of(one) for one in found]
    head = 1 + len(STEP_COLUMNS)
    sizes = {one.exchange_id: (one.seq, decoded_sizes(*one[head:])) for one in found}
    tokens = sum(of_ids for _, (_, of_ids) in sizes.values()) // ID_BYTES
    if tokens > most_tokens:
        raise TooLongError(f"the prompts of session {member.session_id} have {tokens} tokens")
    order = list(parents_first({one.exchange_id: one.parent for one in steps}))
    elsewhere = set() if known is not None else _learned_elsewhere(session, ids, run_id)
    free = set(main_line(steps) if known is None else known) - elsewhere
    temperatures: dict[str, float] = {}
    turns = _turns(session, order, sizes, rules, adapter, free, temperatures)
    return TaskSession(
        session_id=member.session_id,
        reward=member.reward or 0.0,
        source=member.source or "",
        exchange_ids=tuple(ids),
        rows=tuple(join_rows(turns)),
        steps=temperatures,
    )


def _turns(
    session: Session,
    order: Sequence[str],
    sizes: Mapping[str, tuple[int, tuple[int, int]]],
    rules: Rules,
    adapter: str,
    free: Collection[str],
    temperatures: dict[str, float],
) -> Iterator[TokenTurn]:
    """Yield the turns, parents first, and put the temperatures of the exact ones aside."""
    place = {name: at for at, name in enumerate(order)}
    pages = pages_of((sizes[name][0], sum(sizes[name][1])) for name in order)
    for page, _ in read_pages(session, pages):
        for stored in sorted(page, key=lambda one: place[one.exchange.exchange_id]):
            exchange = stored.exchange
            if exchange.adapter == adapter and exchange.exchange_id in free:
                temperature = _temperature(stored, rules)
                if temperature is not None:
                    temperatures[exchange.exchange_id] = temperature
            yield token_turn(stored, trainable=exchange.exchange_id in temperatures)


def _temperature(stored: StoredExchange, rules: Rules) -> float | None:
    """Return what the answers were sampled at; None when they are not exact."""
    exchange = stored.exchange
    # One of several answers may have been chosen for what it says: no plain draw.
    if stored.held_out or exchange.untrainable_reason is not None or len(exchange.choices) != 1:
        return None
    answers = exact_answers(stored.exchange, rules)
    if not answers or any(one.untrainable_reason is not None for one in answers):
        return None
    return answers[0].temperature


def _learned_elsewhere(session: Session, ids: Sequence[str], run_id: str | None) -> set[str]:
    """Return the exchanges whose answer groups another run learns or has learned from."""
    row, learned = GroupRow, GroupRow.status.in_((CLAIMED, TRAINED))
    own = select(row.exchange_id, row.run_id).where(row.exchange_id.in_(ids), learned)
    joined = (
        select(AnswerRow.exchange_id, row.run_id)
        .join(row, row.group_id == AnswerRow.group_id)
        .where(AnswerRow.exchange_id.in_(ids), learned)
    )
    found = {one for one, by in session.execute(own) if run_id is None or by != run_id}
    return found | {one for one, _ in session.execute(joined) if one is not None}
