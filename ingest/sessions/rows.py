"""Join the exchanges of one session to rows of tokens, as training reads them. Pure.

A turn's prompt repeats the conversation, so most tokens of a session come again in each of its
prompts. A row holds them once: a turn extends the row of its parent when its prompt begins with the
parent's prompt and answer, token for token. Otherwise it begins a row of its own, with a link to
the parent's: the client has shortened the conversation, the chat template writes the answer in
other tokens, or another turn has extended the row already (a branch, a retry, a parallel call, a
second choice).

A row therefore begins with the prompt and the answer of each of its turns, exactly as vLLM saw
them. An answer that is a later turn's context in another row is not trained on there: each sampled
token is trainable in one row only.

The work is linear in the tokens given: the prompt of each exchange is read once, and compared with
one row. The memory is that of the rows.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ingest.sessions.messages import (
    Arrival,
    Conversation,
    JsonObject,
    Message,
    read_conversation,
    read_reply,
)
from ingest.sessions.search import RequestReader
from sidecar.errors import UNREADABLE_JSON
from sidecar.records import Exchange
from sidecar.routing.session_key import NAMED


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """One choice of an exchange."""

    index: int
    token_ids: Sequence[int]
    """[S] sampled ids; empty when not reported."""
    logprobs: Sequence[float] = ()
    """[S] nats; of another length: not known, so the answer is not trainable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTurn:
    """One exchange of a session."""

    exchange_id: str
    parent: str | None
    """The exchange that this one continues."""
    prompt_token_ids: Sequence[int]
    """[P] ids of the rendered prompt; empty when not reported: the exchange is then in no row."""
    answers: Sequence[SampledAnswer]
    trainable: bool = True
    """False: its answers are context only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAnswer:
    """Where an answer stands in its row. The row up to `start` is the prompt of its exchange."""

    exchange_id: str
    choice: int
    """Index of the choice."""
    start: int
    stop: int
    """The answer's tokens are `start` to `stop - 1`."""
    logprobs: tuple[float, ...]
    """[stop - start] nats; empty: these tokens are context, and not trainable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLink:
    """The row from which another one branches off."""

    row: int
    shared: int
    """So many first tokens of both rows are the same, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Tokens of turns that extend each other."""

    number: int
    """From 0, in the order in which the rows of the session begin."""
    token_ids: array[int]
    """[L] int32."""
    answers: tuple[RowAnswer, ...]
    """In the order of the tokens. All other tokens were not sampled by vLLM in this row."""
    link: RowLink | None
    """None: no exchange that its first turn continues is in a row."""


@dataclass(slots=True)
class _Row:
    number: int
    link: RowLink | None
    ids: array[int]
    answers: list[RowAnswer] = field(default_factory=list)

    def add(self, turn: TokenTurn, answer: SampledAnswer, prompt: array[int]) -> RowAnswer:
        """Add a turn whose prompt begins with all tokens of this row."""
        self.ids.extend(prompt[len(self.ids) :])
        start = len(self.ids)
        self.ids.extend(array("i", answer.token_ids))
        known = turn.trainable and len(answer.logprobs) == len(answer.token_ids)
        added = RowAnswer(
            exchange_id=turn.exchange_id,
            choice=answer.index,
            start=start,
            stop=len(self.ids),
            logprobs=tuple(answer.logprobs) if known else (),
        )
        self.answers.append(added)
        return added


def parents_first(parents: Mapping[str, str | None]) -> Iterator[str]:
    """Order exchanges so that each comes after its parent, and else as they are given.

    parents: exchange id -> the exchange that it continues. A parent that is not given is no parent;
    a circle, which only damage makes, is cut at one of its links.
    """
    done: set[str] = set()
    for name in parents:
        above: dict[str, None] = {}
        at: str | None = name
        while at is not None and at in parents and at not in done and at not in above:
            above[at] = None
            at = parents[at]
        for one in reversed(above):
            done.add(one)
            yield one


def join_rows(turns: Iterable[TokenTurn]) -> list[TokenRow]:
    """Join the turns of one session to rows.

    turns: each after its parent (`parents_first`); they are taken one by one, and not kept.
    Returns: the rows, in the order in which they begin.
    """
    rows: list[_Row] = []
    ends: dict[str, list[tuple[_Row, RowAnswer]]] = {}
    """Exchange id -> where its answers stand."""
    for turn in turns:
        if turn.prompt_token_ids:
            ends[turn.exchange_id] = _join(turn, ends.get(turn.parent or "", []), rows)
    return [
        TokenRow(number=row.number, token_ids=row.ids, answers=tuple(row.answers), link=row.link)
        for row in rows
    ]


def _join(
    turn: TokenTurn, parent: Sequence[tuple[_Row, RowAnswer]], rows: list[_Row]
) -> list[tuple[_Row, RowAnswer]]:
    """Put the answers of a turn into rows. Returns: where they stand."""
    prompt = array("i", turn.prompt_token_ids)
    row, link = _continued(prompt, parent)
    placed: list[tuple[_Row, RowAnswer]] = []
    # An exchange without an answer is context of those that continue it.
    for answer in turn.answers or (SampledAnswer(index=0, token_ids=()),):
        if row is None:
            row = _Row(len(rows), link, array("i"))
            rows.append(row)
        placed.append((row, row.add(turn, answer, prompt)))
        link = RowLink(row=placed[0][0].number, shared=len(prompt))
        row = None
    return placed


def _continued(
    prompt: array[int], parent: Sequence[tuple[_Row, RowAnswer]]
) -> tuple[_Row | None, RowLink | None]:
    """Find the answer of the parent with which a prompt begins.

    Returns: its row, if the prompt may extend it; else None and the link of a new row.
    """
    if not parent:
        return None, None
    row, first = parent[0]
    if not _same(prompt, row.ids, 0, first.start):
        return None, RowLink(row=row.number, shared=0)
    link = RowLink(row=row.number, shared=first.start)
    free: tuple[int, _Row] | None = None
    # The longest choice: another one may be a beginning of it, or have no ids.
    for row, answer in parent:
        if _same(prompt, row.ids, answer.start, answer.stop):
            if link.shared < answer.stop:
                link = RowLink(row=row.number, shared=answer.stop)
            if answer.stop == len(row.ids) and (free is None or free[0] < answer.stop):
                free = answer.stop, row
    return (None, link) if free is None else (free[1], None)


def _same(one: array[int], other: array[int], start: int, stop: int) -> bool:
    """Return True when both have the same tokens from `start` to `stop - 1`."""
    return len(one) >= stop and one[start:stop] == other[start:stop]


# Read an exchange as the session tree needs it. Pure.

Content = TypeVar("Content")
NOTHING = Conversation((), "", ())


def arrival_of(exchange: Exchange, reader: RequestReader | None = None) -> Arrival:
    """Read an exchange. Never raises: a request or an answer that is no JSON object repeats
    nothing.

    reader: remembers what earlier requests said. The result is the same without it.
    """
    key = exchange.session_key
    return Arrival(
        exchange_id=exchange.exchange_id,
        at=exchange.timings.started_at,
        project=exchange.project,
        key_id=exchange.key_id,
        user=exchange.user,
        session_header=key if key.startswith(NAMED) else "",
        trace_id=exchange.trace_id,
        turn_id=exchange.turn_id,
        conversation=conversation_of(exchange.request, reader),
        replies=replies_of((choice.message for choice in exchange.choices), reader),
    )


def conversation_of(request: bytes, reader: RequestReader | None = None) -> Conversation:
    """Read the body of a request, JSON. Never raises, as `arrival_of`."""
    known = None if reader is None else _remembered(reader.read, request)
    return known or _read(read_conversation, _object(request)) or NOTHING


def replies_of(
    messages: Iterable[bytes], reader: RequestReader | None = None
) -> tuple[Message, ...]:
    """Read the answers of a request, each JSON. Never raises, as `arrival_of`."""
    read = (_reply(message, reader) for message in messages)
    return tuple(reply for reply in read if reply is not None)


def _reply(message: bytes, reader: RequestReader | None) -> Message | None:
    known = None if reader is None else _remembered(reader.read_reply, message)
    return known or _read(read_reply, _object(message))


def _remembered(read: Callable[[bytes], Content | None], data: bytes) -> Content | None:
    """None: to be read as a whole. `json` reads some that `msgspec` refuses: halves of surrogate
    pairs, NaN."""
    try:
        return read(data)
    except UNREADABLE_JSON:
        return None


def _read(read: Callable[[JsonObject], Content], value: JsonObject | None) -> Content | None:
    try:
        return None if value is None else read(value)
    except RecursionError:  # nested more deeply than any content
        return None


def _object(data: bytes) -> JsonObject | None:
    value: Any  # what was sent
    try:
        value = msgspec.json.decode(data)
    except UNREADABLE_JSON:
        try:
            value = json.loads(data)
        except UNREADABLE_JSON:
            return None
    return value if isinstance(value, dict) else None
