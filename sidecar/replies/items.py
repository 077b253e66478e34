"""Read a reply of `/v1/responses`, whole or streamed. Pure.

The output items become one assistant message in the form of chat completions: message items become
its text, function calls its `tool_calls`, reasoning items its `reasoning`. This surface gives no
token ids. The last event of a stream holds the whole reply; from a stream that was cut, the events
that arrived are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sidecar.replies.parts import (
    JsonObject,
    ReadChoice,
    ReadReply,
    UnreadableReplyError,
    Usage,
    decode,
    documents,
)

MAX_ITEMS = 1024
_LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_REFUSAL_DELTA = "response.refusal.delta"
_OTHER_DELTAS = frozenset(
    {"response.output_text.delta", "response.function_call_arguments.delta", _REFUSAL_DELTA}
)
_REASONING_DELTAS = frozenset(
    {"response.reasoning_text.delta", "response.reasoning_summary_text.delta"}
)


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str = ""
    content: list[_Part] | None = None
    summary: list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    model: str | None = None
    output: list[_Item] = []
    status: str | None = None
    incomplete_details: _Incomplete | None = None
    usage: Usage | None = None
    error: object = None


class _Event(msgspec.Struct):
    type: str = ""
    response: _Response | None = None
    item: _Item | None = None
    output_index: int = 0
    delta: object = None
    error: object = None


_RESPONSE = msgspec.json.Decoder(_Response)
_EVENT = msgspec.json.Decoder(_Event)


class _Grown:
    """An item of a stream: its last full state, and the deltas since."""

    __slots__ = ("deltas", "item", "refusals")

    def __init__(self) -> None:
        self.item = _Item()
        self.deltas: list[str] = []
        self.refusals: list[str] = []

    def finished(self) -> _Item:
        text, refusal = "".join(self.deltas), "".join(self.refusals)
        item = self.item
        if not text and not refusal:
            return item
        if item.type == "function_call":
            item.arguments = text
        else:
            item.content = [_Part(text=text or None, refusal=refusal or None)]
        return item


def read_whole(body: bytes) -> ReadReply:
    """Read a reply that is not streamed. Raises: UnreadableReplyError."""
    reply = ReadReply(ended=True)
    _add_response(reply, decode(_RESPONSE, body))
    return reply


def read_stream(chunks: Sequence[bytes]) -> ReadReply:
    """Read a streamed reply. Chunks may be cut anywhere. Raises: UnreadableReplyError."""
    reply = ReadReply()
    items: dict[int, _Grown] = {}
    for document in documents(chunks):
        event = decode(_EVENT, document)
        if event.response is not None:
            if event.type in _LAST_EVENTS:
                _add_response(reply, event.response)
                reply.ended = True
            elif event.response.model is not None:
                reply.models.add(event.response.model)
        elif event.type == "error" or event.error is not None:
            reply.error = "error"
        elif (
            event.item is not None
        ):  # `added` events have an empty item, `done` events the whole one
            grown = _grown(items, event.output_index)
            grown.item, grown.deltas, grown.refusals = event.item, [], []
        elif isinstance(event.delta, str):
            _add_delta(items, event)
    if not reply.choices and items:
        finished = [items[index].finished() for index in sorted(items)]
        reply.choices[0] = ReadChoice(message=_message(finished))
    return reply


def _grown(items: dict[int, _Grown], index: int) -> _Grown:
    if not 0 <= index < MAX_ITEMS:
        raise UnreadableReplyError(f"output item number {index}")
    return items.setdefault(index, _Grown())


def _add_delta(items: dict[int, _Grown], event: _Event) -> None:
    grown = _grown(items, event.output_index)
    if event.type in _REASONING_DELTAS:
        grown.item.type = "reasoning"
    if event.type in _REASONING_DELTAS or event.type in _OTHER_DELTAS:
        pieces = grown.refusals if event.type == _REFUSAL_DELTA else grown.deltas
        pieces.append(str(event.delta))


def _add_response(reply: ReadReply, response: _Response) -> None:
    if response.model is not None:
        reply.models.add(response.model)
    if response.usage is not None:
        reply.completion_tokens = response.usage.output_tokens
    if response.status == "failed" or response.error is not None:
        reply.error = "failed"
    if response.output:
        message = _message(response.output)
        reply.choices[0] = ReadChoice(message=message, finish_reason=_finish(response, message))


def _finish(response: _Response, message: JsonObject) -> str:
    if response.status == "incomplete":
        details = response.incomplete_details
        filtered = details is not None and details.reason == "content_filter"
        return "content_filter" if filtered else "length"
    return "tool_calls" if "tool_calls" in message else "stop"


def _message(items: Iterable[_Item]) -> JsonObject:
    message: JsonObject = {"role": "assistant"}
    texts, refusals, thoughts = [], [], []
    calls: list[JsonObject] = []
    for item in items:
        parts = item.content or ()
        if item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments or ""}
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == "reasoning":
            thoughts += [part.text or "" for part in (*parts, *(item.summary or ()))]
        else:
            texts += [part.text for part in parts if part.text is not None]
            refusals += [part.refusal for part in parts if part.refusal is not None]
    message["content"] = "".join(texts) if texts else None
    if refusals:
        message["refusal"] = "".join(refusals)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
