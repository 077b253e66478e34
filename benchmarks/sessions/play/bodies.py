"""Writes a request body of any surface from a conversation in the form of chat. Pure: a seeded
generator gives the chance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

from benchmarks.sessions.play.clients import Client
from benchmarks.sessions.tasks import JsonObject

_CACHED = {"type": "ephemeral"}


def body(
    client: Client,
    *,
    system: str,
    tools: Sequence[JsonObject],
    messages: Sequence[JsonObject],
    now: float,
    rng: Random,
) -> bytes:
    """Write the body that the client sends at `now` (Unix seconds)."""
    if client.clock:
        system = f"Current time: {datetime.fromtimestamp(now, UTC).isoformat()}\n{system}"
    messages = [dict(one) for one in messages]
    if client.new_call_ids:
        messages = _with_new_ids(messages, rng)
    if client.loose_content:
        messages = [_loosely(one, rng) for one in messages]
    if client.marks:
        messages = _marked(messages, every=client.marks == "blocks")
    request = {"chat": _chat, "responses": _responses, "messages": _messages}[client.surface](
        system, tools, messages
    )
    request["temperature"] = 1.0
    if client.user:
        request["user"] = client.user
    if client.choices > 1:
        request["n"] = client.choices
    if client.loose_json:
        return _loose_json(request, rng)
    return json.dumps(request, ensure_ascii=False).encode()


def _chat(system: str, tools: Sequence[JsonObject], messages: Sequence[JsonObject]) -> JsonObject:
    request: JsonObject = {"model": "model", "messages": [*messages]}
    if system:
        request["messages"].insert(0, {"role": "system", "content": system})
    if tools:
        request["tools"] = list(tools)
    return request


def _responses(
    system: str, tools: Sequence[JsonObject], messages: Sequence[JsonObject]
) -> JsonObject:
    """The whole conversation is sent as `input`, without `previous_response_id`."""
    items: list[JsonObject] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": content,
                }
            )
            continue
        kind = "output_text" if role == "assistant" else "input_text"
        if content:
            parts = content if isinstance(content, list) else [{"text": content}]
            items.append(
                {
                    "type": "message",
                    "role": role,
                    "content": [{**part, "type": kind} for part in parts],
                }
            )
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ]
    request: JsonObject = {"model": "model", "instructions": system, "input": items, "store": False}
    if tools:
        request["tools"] = [{"type": "function", **one["function"]} for one in tools]
    return request


def _messages(
    system: str, tools: Sequence[JsonObject], messages: Sequence[JsonObject]
) -> JsonObject:
    """Anthropic's surface: content blocks; results of calls stand in one message of the user."""
    written: list[JsonObject] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": content,
            }
            if written and written[-1]["role"] == "user" and _has_results(written[-1]):
                written[-1]["content"].append(result)
            else:
                written.append({"role": "user", "content": [result]})
            continue
        texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        blocks: list[JsonObject] = texts if content else []
        uses = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls", ())
        ]
        written.append({"role": role, "content": [*blocks, *uses]})
    request: JsonObject = {"model": "model", "max_tokens": 4096, "messages": written}
    if system:
        request["system"] = [{"type": "text", "text": system}]
    if tools:
        request["tools"] = [
            {
                "name": one["function"]["name"],
                "description": one["function"]["description"],
                "input_schema": one["function"]["parameters"],
            }
            for one in tools
        ]
    return request


def _has_results(message: JsonObject) -> bool:
    return any(block["type"] == "tool_result" for block in message["content"])


def _with_new_ids(messages: Sequence[JsonObject], rng: Random) -> list[JsonObject]:
    """Calls and their results get new ids, which belong together as before."""
    new: dict[str, str] = {}
    written = []
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                new[call["id"]] = f"call_{rng.getrandbits(48):012x}"
            message = {**message, "tool_calls": [{**call, "id": new[call["id"]]} for call in calls]}
        elif message.get("tool_call_id") in new:
            message = {**message, "tool_call_id": new[message["tool_call_id"]]}
        written.append(message)
    return written


def _loosely(message: JsonObject, rng: Random) -> JsonObject:
    """An assistant message as one of many clients replays it."""
    content = message.get("content")
    if message["role"] != "assistant":
        return message
    if content is None:
        without = {key: value for key, value in message.items() if key != "content"}
        return rng.choice([message, {**message, "content": ""}, without])
    if not isinstance(content, str):
        return message
    block = [{"type": "text", "text": content.strip()}]
    return {**message, "content": rng.choice([content, content.strip(), block])}


def _marked(messages: Sequence[JsonObject], *, every: bool) -> list[JsonObject]:
    """`cache_control` on the last text of the user; every: all texts of users are blocks."""
    users = [n for n, one in enumerate(messages) if one["role"] == "user"]
    written = list(messages)
    for number in users:
        text = messages[number]["content"]
        block: JsonObject = {"type": "text", "text": text}
        if number == users[-1]:
            block["cache_control"] = _CACHED
        elif not every:
            continue
        written[number] = {**messages[number], "content": [block]}
    return written


def _loose_json(request: JsonObject, rng: Random) -> bytes:
    for message in request.get("messages", ()):
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"] = {
                **call["function"],
                "arguments": json.dumps(_shuffled(arguments, rng), ensure_ascii=False),
            }
    request = _shuffled(request, rng)
    text = json.dumps(
        request,
        indent=rng.choice([None, None, 1, 2]),
        separators=rng.choice([None, (",", ":"), (" , ", " : ")]),
        ensure_ascii=rng.random() < 0.5,
    )
    return text.encode()


def _shuffled(value: Any, rng: Random) -> Any:  # Any: JSON
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: _shuffled(value[key], rng) for key in keys}
    if isinstance(value, list):
        return [_shuffled(one, rng) for one in value]
    return value
