"""Read a recorded session as one trajectory, with what was told of how it ended.

The last request of a conversation repeats it, so only the last exchange is read, with its reply;
where the client has shortened the conversation, also the last exchange before each such cut.
Sub-agents, branches that were given up, and exchanges that failed are no part of the trajectory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.feedback.signals import ToolResult, in_words, tool_results
from ingest.feedback.store import annotations_of_session
from ingest.sessions.rows import conversation_of, parents_first
from ingest.store.exchanges import StoredExchange, load_exchange
from ingest.store.sessions import stored_name
from ingest.trajectories.records import TrajectoriesError
from sidecar.store.models import ExchangeRow

MOST_EXCHANGES: Final = 10_000
"""Exchanges of a session that are looked at, the newest."""
MOST_CUTS: Final = 8
"""Parts of a conversation that are read, the newest: each repeats a whole conversation."""
SUB_AGENT: Final = "called"
"""`placed_by` of an exchange that a tool call began."""
CUT: Final = {"role": "note", "content": "here the client shortened the conversation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrajectory:
    """A session as the judge is to see it."""

    session_id: str
    project: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    exchanges: int
    """Exchanges of the session, as far as they were looked at."""
    outcome: Mapping[str, Any]
    """`success`, `reward`, `feedback_score` and `signals`, as `Annotations.summary` has them;
    `tools`: what is known of their results, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An exchange of a session, without its bodies."""

    exchange_id: str
    parent: str | None
    how: str
    segment: int
    began_at: float
    fits: bool
    """It is a chat that was answered."""


STEP_COLUMNS: Final = (
    ExchangeRow.exchange_id,
    ExchangeRow.parent_id,
    ExchangeRow.placed_by,
    ExchangeRow.segment,
    ExchangeRow.started_at,
    ExchangeRow.surface,
    ExchangeRow.outcome,
    ExchangeRow.status,
)


def step_of(row: Any) -> Step:
    return Step(
        exchange_id=row.exchange_id,
        parent=row.parent_id,
        how=row.placed_by,
        segment=row.segment,
        began_at=row.started_at,
        fits=(row.surface, row.outcome, row.status) == ("chat", "ok", 200),
    )


def load_trajectory(
    session: Session, name: str, *, among: Collection[str] | None = None
) -> RecordedTrajectory:
    """Read a session.

    name: as `ingest.store.sessions.stored_name` takes it. among: exchanges that count; None: all.
    Raises: TrajectoriesError when there is no such session, or no answered chat in it;
        UnreadableExchangesError.
    """
    known = stored_name(session, name)
    newest = select(*STEP_COLUMNS, ExchangeRow.project).where(ExchangeRow.session_id == known)
    rows = session.execute(newest.order_by(ExchangeRow.seq.desc()).limit(MOST_EXCHANGES)).all()
    if not rows:
        raise TrajectoriesError(
            f"no session {name} is stored; `sidecar exchanges ls` names the session of each"
        )
    steps = [step_of(row) for row in reversed(rows) if among is None or row.exchange_id in among]
    parts = last_of_each_part(steps)
    if not parts:
        raise TrajectoriesError(f"session {name} has no answered chat, so there is nothing to rank")
    found = [one for one in (load_exchange(session, part) for part in parts) if one is not None]
    messages: list[Mapping[str, Any]] = []
    tools: Sequence[Mapping[str, Any]] = ()
    results: Counter[ToolResult] = Counter()
    for number, stored in enumerate(found):
        request = _object(stored.exchange.request)
        tools = request.get("tools") or ()
        # What a later part repeats counts once.
        results |= Counter(tool_results(conversation_of(stored.exchange.request).messages))
        messages += [CUT] if number else []
        messages += [*(request.get("messages") or ()), *_replies(stored)]
    return RecordedTrajectory(
        session_id=known,
        project=rows[0].project,
        messages=tuple(messages),
        tools=tuple(tools),
        exchanges=len(rows),
        outcome=annotations_of_session(session, known).summary()
        | {"tools": in_words(results.elements())},
    )


def last_of_each_part(steps: Sequence[Step]) -> list[str]:
    """Return the exchanges to read: the last one of each part of the main conversation. Pure.

    steps: of one session, in the order of storing.
    Returns: their ids, the oldest part first; empty when no chat was answered.
    """
    ends: dict[int, str] = {}
    for step in _main(steps):
        if step.fits and step.segment not in ends:
            ends[step.segment] = step.exchange_id
    return [ends[segment] for segment in sorted(ends)][-MOST_CUTS:]


def main_line(steps: Sequence[Step]) -> list[str]:
    """Return the exchanges of the main conversation, the newest first: no sub-agent, no branch that
    was given up. Pure. steps: as for `last_of_each_part`."""
    return [step.exchange_id for step in _main(steps)]


def _main(steps: Sequence[Step]) -> list[Step]:
    by_id = {one.exchange_id: one for one in steps}
    of_agent: dict[str, bool] = {}
    for name in parents_first({one.exchange_id: one.parent for one in steps}):
        step = by_id[name]
        of_agent[name] = step.how != SUB_AGENT and of_agent.get(step.parent or "", True)
    main = [one for one in steps if one.fits and of_agent[one.exchange_id]]
    if not main:
        return []
    at: Step | None = max(reversed(main), key=lambda one: (one.segment, one.began_at))
    found: dict[str, Step] = {}
    while at is not None and at.exchange_id not in found:  # a circle is damage
        found[at.exchange_id] = at
        at = by_id.get(at.parent or "")
    return list(found.values())


def _replies(stored: StoredExchange) -> list[Mapping[str, Any]]:
    """Return the reply that the agent got, if there is one."""
    exchange = stored.exchange
    for choice in exchange.choices:
        if choice.index == exchange.returned_index:
            return [{"role": "assistant", **_object(choice.message)}]
    return []


def _object(body: bytes) -> Mapping[str, Any]:
    """Raises: TrajectoriesError when a body is no JSON object."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TrajectoriesError("a stored body is no JSON object, so its session cannot be ranked")
    return found
