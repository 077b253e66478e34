"""Read a captured chat reply: whole, or put together from the events of its stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sidecar.relay.sse import EventSplitter

JsonObject = dict[str, Any]  # Any: vLLM's message, kept as it is


class UnreadableReplyError(Exception):
    """The reply is not what a chat reply looks like; stays inside the capture."""


@dataclass(slots=True)
class ReadChoice:
    """One answer, as far as it was seen."""

    message: JsonObject
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ReadReply:
    """What a reply says, whole or streamed."""

    models: set[str] = field(default_factory=set)
    """Every model name it gives: one, if all is well."""
    choices: dict[int, ReadChoice] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    completion_tokens: int | None = None
    error: str | None = None
    """The error event with which vLLM ends a stream that broke."""
    ended: bool = False
    """A whole reply, or a stream that reached `[DONE]`."""


class _Entry(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: JsonObject | None = None
    delta: JsonObject | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Reply(msgspec.Struct):
    model: str | None = None
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None
    error: JsonObject | None = None


_DECODER = msgspec.json.Decoder(_Reply)


def read_whole(body: bytes) -> ReadReply:
    """Read a reply that came in one piece. Raises UnreadableReplyError."""
    reply = ReadReply()
    _add(reply, body)
    reply.ended = True
    return reply


def read_stream(chunks: Sequence[bytes]) -> ReadReply:
    """Put a stream together. Chunks may be cut anywhere. Raises UnreadableReplyError."""
    reply = ReadReply()
    splitter = EventSplitter()
    for event in splitter.feed(b"".join(chunks)):
        for line in event.splitlines():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                reply.ended = True
            else:
                _add(reply, data)
    return reply


def _add(reply: ReadReply, data: bytes) -> None:
    try:
        part = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise UnreadableReplyError(str(error)) from error
    if part.model is not None:
        reply.models.add(part.model)
    if part.error is not None:
        reply.error = str(part.error.get("type", "error"))
    if part.prompt_token_ids and not reply.prompt_token_ids:
        reply.prompt_token_ids = part.prompt_token_ids
    if part.usage is not None and part.usage.completion_tokens is not None:
        reply.completion_tokens = part.usage.completion_tokens
    for choice in part.choices:
        known = reply.choices.setdefault(choice.index, ReadChoice(message={}))
        known.token_ids += choice.token_ids or ()
        if choice.logprobs is not None:
            known.logprobs += (entry.logprob for entry in choice.logprobs.content or ())
        known.finish_reason = choice.finish_reason or known.finish_reason
        _merge(known.message, choice.message or choice.delta or {})


def _merge(message: JsonObject, delta: JsonObject) -> None:
    """Add a delta to a message: text grows, tool calls grow by their index, the rest is set."""
    for key, value in delta.items():
        if value is None:
            continue
        if key == "tool_calls":
            _merge_tool_calls(message.setdefault("tool_calls", []), value)
        elif isinstance(value, str) and key != "role":
            message[key] = str(message.get(key) or "") + value
        else:
            message[key] = value


def _merge_tool_calls(calls: list[JsonObject], deltas: list[JsonObject]) -> None:
    for place, delta in enumerate(deltas):
        index = delta.get("index", place)
        while len(calls) <= index:
            calls.append({"id": None, "type": "function", "function": {}})
        call = calls[index]
        for key in ("id", "type"):
            if delta.get(key) is not None:
                call[key] = delta[key]
        function = call["function"]
        for key, text in (delta.get("function") or {}).items():
            if text is not None:
                function[key] = str(function.get(key) or "") + text


def message_json(message: JsonObject) -> bytes:
    """The message as it is recorded: role, content, then what else it has; no empty members."""
    kept: JsonObject = {
        "role": message.get("role", "assistant"),
        "content": message.get("content"),
    }
    kept |= {key: value for key, value in message.items() if key not in kept and value != []}
    if not kept["content"] and kept.get("tool_calls"):
        kept["content"] = None  # whole replies say null, streams "", and both mean no text
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
