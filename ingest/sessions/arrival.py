"""Read an exchange as the session tree needs it. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ingest.sessions.messages import Conversation, JsonObject, read_conversation, read_reply
from ingest.sessions.records import Arrival
from sidecar.errors import UNREADABLE_JSON
from sidecar.records import Exchange

NAMED = ("h:", "hx:")
"""Beginnings of the session keys that a client's header names (`sidecar.routing.session_key`)."""
NOTHING = Conversation((), "", ())


def arrival_of(exchange: Exchange) -> Arrival:
    """Never raises: a request or an answer that is no JSON object repeats nothing."""
    request = _object(exchange.request)
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
        conversation=NOTHING if request is None else read_conversation(request),
        replies=tuple(
            read_reply(message)
            for choice in exchange.choices
            if (message := _object(choice.message)) is not None
        ),
    )


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
