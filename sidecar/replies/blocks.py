"""Read a reply of `/v1/messages` (Anthropic's API), whole or streamed. Pure.

The content blocks become one assistant message in the form of chat completions: text blocks become
its text, `tool_use` its `tool_calls`, `thinking` its `reasoning`. This surface gives no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec

from sidecar.replies.parts import (
    JsonObject,
    ReadChoice,
    ReadReply,
    UnreadableReplyError,
    decode,
    documents,
    dumped,
)

MAX_BLOCKS = 1024
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


class _Block(msgspec.Struct):
    type: str = ""
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None


class _Usage(msgspec.Struct):
    output_tokens: int | None = None


class _Message(msgspec.Struct):
    content: list[_Block] = []
    model: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: _Usage | None = None
    error: object = None


class _Delta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    message: _Message | None = None
    content_block: _Block | None = None
    index: int = 0
    delta: _Delta | None = None
    usage: _Usage | None = None


_MESSAGE = msgspec.json.Decoder(_Message)
_EVENT = msgspec.json.Decoder(_Event)


class _Grown:
    """A streamed block: its kind, and its text, thinking or arguments in pieces."""

    __slots__ = ("block", "pieces")

    def __init__(self, block: _Block) -> None:
        self.block = block
        self.pieces: list[str] = [block.text or block.thinking or ""]


def read_whole(body: bytes) -> ReadReply:
    """Read a reply that is not streamed. Raises: UnreadableReplyError."""
    message = decode(_MESSAGE, body)
    reply = ReadReply(ended=True)
    _add_message(reply, message)
    if message.error is not None:
        reply.error = "error"
    if message.content:
        blocks = [
            (block, block.text or block.thinking or _arguments(block)) for block in message.content
        ]
        reply.choices[0] = ReadChoice(
            message=_assistant(blocks),
            finish_reason=_FINISH.get(message.stop_reason or "", message.stop_reason),
            stop_reason=message.stop_sequence,
        )
    return reply


def read_stream(chunks: Sequence[bytes]) -> ReadReply:
    """Read a streamed reply. Chunks may be cut anywhere. Raises: UnreadableReplyError."""
    reply = ReadReply()
    grown: dict[int, _Grown] = {}
    last = _Delta()
    for document in documents(chunks):
        event = decode(_EVENT, document)
        if event.usage is not None and event.usage.output_tokens is not None:
            reply.completion_tokens = event.usage.output_tokens
        if event.type == "content_block_delta" and event.delta is not None:
            _block(grown, event.index).pieces.append(_piece(event.delta))
        elif event.content_block is not None:
            _block(grown, event.index, event.content_block)
        elif event.type == "message_start" and event.message is not None:
            _add_message(reply, event.message)
        elif event.type == "message_delta" and event.delta is not None:
            last = event.delta
        elif event.type == "message_stop":
            reply.ended = True
        elif event.type == "error":
            reply.error = "error"
    if grown:
        blocks = [(grown[index].block, "".join(grown[index].pieces)) for index in sorted(grown)]
        reply.choices[0] = ReadChoice(
            message=_assistant(blocks),
            finish_reason=_FINISH.get(last.stop_reason or "", last.stop_reason),
            stop_reason=last.stop_sequence,
        )
    return reply


def _block(grown: dict[int, _Grown], index: int, started: _Block | None = None) -> _Grown:
    if not 0 <= index < MAX_BLOCKS:
        raise UnreadableReplyError(f"content block number {index}")
    if started is not None:
        grown[index] = _Grown(started)
    elif index not in grown:
        raise UnreadableReplyError(f"content block {index} grows and never began")
    return grown[index]


def _piece(delta: _Delta) -> str:
    return delta.text or delta.thinking or delta.partial_json or ""


def _arguments(block: _Block) -> str:
    return "" if block.input is None else dumped(block.input)


def _rewritten(arguments: str) -> str:
    """Write streamed arguments as those of a whole reply are; as they came when they are cut."""
    try:
        return dumped(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return arguments


def _add_message(reply: ReadReply, message: _Message) -> None:
    if message.model is not None:
        reply.models.add(message.model)
    if message.usage is not None:
        reply.completion_tokens = message.usage.output_tokens


def _assistant(blocks: Iterable[tuple[_Block, str]]) -> JsonObject:
    """blocks: blocks with their joined text, thinking or arguments."""
    message: JsonObject = {"role": "assistant"}
    texts, thoughts = [], []
    calls: list[JsonObject] = []
    for block, text in blocks:
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": _rewritten(text)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(text)
        elif block.type == "text":
            texts.append(text)
    message["content"] = "".join(texts) if texts else None
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
