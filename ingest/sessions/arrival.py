"""Read an exchange as the session tree needs it. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from ingest.sessions.messages import Conversation, JsonObject, read_conversation, read_reply
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
    return read_arrival(
        exchange_id=exchange.exchange_id,
        at=exchange.timings.started_at,
        project=exchange.project,
        key_id=exchange.key_id,
        user=exchange.user,
        session_key=exchange.session_key,
        trace_id=exchange.trace_id,
        turn_id=exchange.turn_id,
        request=exchange.request,
        messages=[choice.message for choice in exchange.choices],
    )


def read_arrival(
    *,
    exchange_id: str,
    at: float,
    project: str,
    key_id: str,
    user: str,
    session_key: str,
    trace_id: str,
    turn_id: str,
    request: bytes,
    messages: Iterable[bytes],
) -> Arrival:
    """Read an exchange whose fields are at hand. messages: the answers, JSON."""
    body = _object(request)
    answers = map(_object, messages)
    return Arrival(
        exchange_id=exchange_id,
        at=at,
        project=project,
        key_id=key_id,
        user=user,
        session_header=session_key if session_key.startswith(NAMED) else "",
        trace_id=trace_id,
        turn_id=turn_id,
        conversation=_read(read_conversation, body) or NOTHING,
        replies=tuple(
            reply for answer in answers if (reply := _read(read_reply, answer)) is not None
        ),
    )


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
