"""What the traffic itself tells of an answer: the rules. Pure.

Each signal is about one answer, is shown by a later exchange, and follows from the structure of the
conversation: which exchange continues which, what was asked, whether a reply came. No rule reads
what users write; one small rule reads what tools return (`tool_results`). docs/feedback.md states
each rule for people.

The same exchanges give the same signals in whatever order they arrive.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.grouping.selection import RATE, STAGE
from ingest.sessions.messages import Message, chain
from ingest.sessions.rows import arrival_of
from ingest.store.exchanges import NEW, set_selection
from sidecar.errors import UNREADABLE_JSON
from sidecar.records import Exchange
from sidecar.store.database import count
from sidecar.store.models import ExchangeRow

SignalKind = Literal["regeneration", "correction", "retry", "tool_error", "abandonment"]
ToolState = Literal["ok", "failed", "unknown"]
FailureRule = Literal["flag", "json", "text"]
"""Of the rules, the surest first."""
NEXT: Final = 8
"""Later siblings that are compared with an exchange: a fan-out of hundreds stays cheap."""
ALIKE: Final = 0.5
"""Share of common runs of three characters from which a message is an edit of another one."""
COMPARED: Final = 2_000
"""Characters of a message that are compared."""
_ERROR_WORDS: Final = ("error:", "exception:", "traceback (most recent call last)")
"""How programs begin a message of failure, in lower case."""
_LONGEST_JSON: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One signal. At most one of each kind is kept for an exchange."""

    kind: SignalKind
    exchange_id: str
    """The answer that it is about."""
    by_id: str | None
    """The exchange that shows it."""
    session_id: str
    at: float
    """When it showed, Unix seconds: when `by_id` began."""
    evidence: dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An exchange as the rules need it."""

    exchange_id: str
    session_id: str
    began_at: float
    ended_at: float
    answered: bool
    """It got a complete answer."""
    turn_id: str
    before: bytes
    """Digest of the conversation without its last message."""
    asked: bytes
    """Digest of the conversation."""
    said: str | None
    """The last message, if a user wrote it."""


def turn_of(exchange: Exchange, *, session_id: str) -> Turn:
    """Read an exchange as the rules need it."""
    messages = arrival_of(exchange).conversation.messages
    links = chain(b"", messages)
    last = messages[-1] if messages else None
    return Turn(
        exchange_id=exchange.exchange_id,
        session_id=session_id,
        began_at=exchange.timings.started_at,
        ended_at=exchange.timings.started_at + exchange.timings.total_s,
        answered=exchange.outcome == "ok" and exchange.status == 200 and bool(exchange.choices),
        turn_id=exchange.turn_id,
        before=links[-2] if messages else links[-1],
        asked=links[-1],
        said=last.text if last is not None and last.role == "user" else None,
    )


def between(siblings: Sequence[Turn], *, first: bool) -> list[Signal]:
    """Return the signals of exchanges of one session that continue the same exchange.

    first: they continue none, so another question is a new conversation and corrects nothing.
    Of each kind the first later sibling that shows it counts.
    """
    order = sorted(siblings, key=lambda turn: (turn.began_at, turn.exchange_id))
    found: list[Signal] = []
    for place, turn in enumerate(order):
        kinds: set[str] = set()
        for later in order[place + 1 : place + 1 + NEXT]:
            signal = _shown(turn, later, first=first)
            if signal is not None and signal.kind not in kinds:
                kinds.add(signal.kind)
                found.append(signal)
    return found


def _shown(turn: Turn, later: Turn, *, first: bool) -> Signal | None:
    """What `later` shows about `turn`, which has the same parent and began before it."""
    after_s = round(later.began_at - turn.ended_at, 3)
    same_turn = bool(turn.turn_id) and turn.turn_id == later.turn_id
    if turn.asked == later.asked:
        if not turn.answered or same_turn:
            reason = "same_turn" if same_turn else "no_answer"
            return _signal("retry", turn, later, {"reason": reason})
        if after_s >= 0:
            return _signal("regeneration", turn, later, {"after_s": after_s})
        return None
    if turn.said is None or later.said is None or turn.before != later.before:
        return None
    if first or not turn.answered or after_s < 0:
        return None
    likeness = alike(turn.said, later.said)
    if likeness < ALIKE:
        return None
    return _signal("correction", turn, later, {"after_s": after_s, "alike": round(likeness, 3)})


def _signal(kind: SignalKind, turn: Turn, later: Turn, evidence: dict[str, Any]) -> Signal:
    return Signal(
        kind=kind,
        exchange_id=turn.exchange_id,
        by_id=later.exchange_id,
        session_id=turn.session_id,
        at=later.began_at,
        evidence=evidence,
    )


def alike(left: str, right: str) -> float:
    """Return how alike two texts are, 0..1: the Dice coefficient of their runs of three characters.
    It knows no language."""
    grams = [
        Counter(text[at : at + 3] for at in range(max(1, len(text) - 2)))
        for text in (left[:COMPARED].casefold(), right[:COMPARED].casefold())
    ]
    both = sum((grams[0] & grams[1]).values())
    return 2 * both / (sum(grams[0].values()) + sum(grams[1].values()))


class ToolResult(NamedTuple):
    """What is known of one result of a tool."""

    state: ToolState
    rule: FailureRule | None
    """By which it failed."""
    digest: bytes
    """Of what the tool returned: another request that repeats the result has it too."""


def tool_results(messages: Iterable[Message]) -> list[ToolResult]:
    """Return what is known of each result of a tool. messages: canonical.

    `failed`: by one of the rules of `tool_error`. `ok`: by none of them, and the protocol says that
    it did not fail: `is_error` false (Messages API), a completed `mcp_call` without an error
    (Responses API), or a text that is an MCP result with `isError` false. Else `unknown`: a flag
    that is absent and a text that looks well say nothing.
    """
    found = (message for message in messages if message.role == "tool")
    return [ToolResult(*_state_of(message), message.digest()) for message in found]


def since_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages after the last one of the assistant."""
    at = len(messages)
    while at and messages[at - 1].role != "assistant":
        at -= 1
    return messages[at:]


def in_words(results: Iterable[ToolResult]) -> str | None:
    """Return how many results are in each state, as "3 ok, 2 unknown"; None when there are none."""
    counts = Counter(result.state for result in results)
    return ", ".join(f"{counts[one]} {one}" for one in get_args(ToolState) if counts[one]) or None


def tool_error(messages: Sequence[Message]) -> FailureRule | None:
    """Return by which rule a request says that a tool failed after the last answer; None when it
    says no such thing. messages: canonical, of the request.

    `flag`: the protocol says so beside the result. `json`: a result is a JSON object which says
    `isError` or `is_error`, has an `error`, `success` or `ok` that is false, or the `status`
    "error". `text`: a result begins with "Error:", "Exception:" or a Python traceback.
    """
    rules = {result.rule for result in tool_results(since_answer(messages))}
    return next((rule for rule in get_args(FailureRule) if rule in rules), None)


def _state_of(result: Message) -> tuple[ToolState, FailureRule | None]:
    if result.failed:
        return "failed", "flag"
    value = _object_of(result.text)
    if (
        value.get("isError") is True
        or value.get("is_error") is True
        or value.get("error")
        or value.get("success") is False
        or value.get("ok") is False
        or value.get("status") == "error"
    ):
        return "failed", "json"
    if result.text[:64].casefold().startswith(_ERROR_WORDS):
        return "failed", "text"
    of_mcp = value.get("isError") is False and isinstance(value.get("content"), list)
    return ("ok" if of_mcp or result.failed is False else "unknown"), None


def _object_of(text: str) -> dict[str, Any]:  # Any: JSON
    """Return the JSON object that a text is; empty when it is none, or a very long one."""
    if not text.startswith("{") or len(text) > _LONGEST_JSON:
        return {}
    try:
        return dict(json.loads(text))
    except UNREADABLE_JSON:
        return {}


# Draw an exchange again whose user turns out to be discontent after it was left out.

NEWEST: Final = 32
"""Exchanges of a session that are drawn again at once, the newest: `groups.max_groups_per_session`
makes groups of few."""


def draw_again(session: Session, exchange_ids: Collection[str]) -> None:
    """Have those of these exchanges decided again that were not drawn, in the caller's write
    transaction. Each leaves the count of `rate` until then."""
    if not exchange_ids:
        return
    names = session.scalars(
        select(ExchangeRow.exchange_id).where(
            ExchangeRow.exchange_id.in_(sorted(exchange_ids)), ExchangeRow.selection == RATE
        )
    ).all()
    if names:
        set_selection(session, names, NEW)
        count(session, STAGE, RATE, -len(names))


def draw_session_again(session: Session, session_id: str) -> None:
    """The same for the newest exchanges of a session, for feedback on the whole of it."""
    names = session.scalars(
        select(ExchangeRow.exchange_id)
        .where(
            ExchangeRow.session_id == session_id,
            ExchangeRow.held_out.is_(False),  # others are never drawn, and the index knows it
            ExchangeRow.selection == RATE,
        )
        .order_by(ExchangeRow.seq.desc())
        .limit(NEWEST)
    ).all()
    draw_again(session, names)
