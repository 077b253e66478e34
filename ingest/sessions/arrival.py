"""Read an exchange as the session tree needs it. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from ingest.sessions.memory import RequestReader
from ingest.sessions.messages import (
    Conversation,
    JsonObject,
    Message,
    read_conversation,
    read_reply,
)
from ingest.sessions.records import Arrival
from sidecar.errors import UNREADABLE_JSON
from sidecar.records import Exchange
from sidecar.routing.session_key import NAMED

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
