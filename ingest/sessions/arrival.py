"""Read an exchange as the session tree needs it. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

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

NAMED = ("h:", "hx:")
"""Beginnings of the session keys that a client's header names (`sidecar.routing.session_key`)."""
Content = TypeVar("Content")
NOTHING = Conversation((), "", ())


def arrival_of(exchange: Exchange) -> Arrival:
    """Read an exchange. Never raises: a request or an answer that is no JSON object repeats
    nothing."""
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
        conversation=conversation_of(exchange.request),
        replies=replies_of(choice.message for choice in exchange.choices),
    )


def conversation_of(request: bytes) -> Conversation:
    """Read the body of a request, JSON. Never raises, as `arrival_of`."""
    return _read(read_conversation, _object(request)) or NOTHING


def replies_of(messages: Iterable[bytes]) -> tuple[Message, ...]:
    """Read the answers of a request, each JSON. Never raises, as `arrival_of`."""
    read = (_read(read_reply, _object(message)) for message in messages)
    return tuple(reply for reply in read if reply is not None)


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
