"""What is read from a reply, in one form for all surfaces. Pure.

Each kind of surface has a reader (`choices.py`, `items.py`, and here). All return assistant
messages in the form of chat completions, and what vLLM reported about the sampling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from sidecar.errors import UNREADABLE_JSON

JsonObject = dict[str, Any]  # Any: vLLM's message, kept as it is
_BLOCK = 65_536
"""Bytes of a stream that are joined at once. Larger blocks are not faster, and copying and
splitting a block holds the interpreter lock that the relay's thread needs."""
_DONE = b"[DONE]"
WITHHELD = "withheld"
"""Field of a recorded answer: text that was sampled, and that a tool parser did not send because it
could not read it as a call, such as one that the token limit cut."""

Document = TypeVar("Document")


class UnreadableReplyError(Exception):
    """The reply does not have the form of this surface. Raised and handled inside the capture."""


class ReadChoice(msgspec.Struct, gc=False):
    """One answer, as far as it arrived."""

    message: JsonObject
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """vLLM's `stop_reason`: the stop string or stop token that ended the answer; None at the usual
    end token."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    token_texts: list[str] = []
    """[S] text of each sampled token, from the log-probabilities."""


class ReadReply(msgspec.Struct, gc=False):
    """The content of a reply, whole or streamed."""

    models: set[str] = set()
    """All model names in the reply; exactly one in a sound reply."""
    choices: dict[int, ReadChoice] = {}
    prompt_ids: bytes = b""
    """Token ids of the prompt, a JSON array as vLLM wrote it; empty when not reported."""
    several_prompts: bool = False
    """The request was a list of prompts: the answers belong to different prompts."""
    completion_tokens: int | None = None
    error: str | None = None
    """The error with which vLLM ended a failed stream."""
    ended: bool = False
    """The reply is whole, or the stream reached the end mark of its surface."""


def documents(chunks: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the `data` of each event of a stream, which may be cut anywhere. An event without a
    blank line after it was cut off and is left out. `[DONE]` is yielded too, with a possible
    leading space (`is_done`). Every data line is one document, because vLLM writes its replies on
    one line."""
    pending: list[bytes] = []
    size, wanted = 0, _BLOCK
    for chunk in chunks:
        pending.append(chunk)
        size += len(chunk)
        if size < wanted:
            continue
        block = b"".join(pending)
        end = _last_blank_line(block)
        yield from _data_lines(block[:end])
        rest = block[end:]
        # A long event is copied only each time its size doubles.
        pending, size, wanted = [rest], len(rest), max(_BLOCK, 2 * len(rest))
    block = b"".join(pending)
    yield from _data_lines(block[: _last_blank_line(block)])


def _last_blank_line(block: bytes) -> int:
    """Return where the bytes after the last blank line begin; 0 when there is none."""
    plain = block.rfind(b"\n\n")
    # Searching for an absent string scans the whole block; a single byte is found much faster.
    spelled = block.rfind(b"\n\r\n") if b"\r" in block else -1
    return max(plain + 2 if plain >= 0 else 0, spelled + 3 if spelled >= 0 else 0)


def _data_lines(events: bytes) -> list[bytes]:
    return [line[5:] for line in events.split(b"\n") if line.startswith(b"data:")]


def is_done(document: bytes) -> bool:
    """Return True for the mark that ends a stream of chat or text completions."""
    return len(document) <= len(_DONE) + 2 and document.strip() == _DONE


def decode(decoder: msgspec.json.Decoder[Document], data: bytes) -> Document:
    """Decode one JSON document from vLLM. msgspec refuses NaN and lone surrogates, which vLLM can
    write: then Python's slower json decodes it. Raises: UnreadableReplyError."""
    try:
        return decoder.decode(data)
    except UNREADABLE_JSON:
        try:
            return msgspec.convert(json.loads(data.decode("utf-8", "replace")), decoder.type)
        except UNREADABLE_JSON as error:
            raise UnreadableReplyError(str(error)) from error


def canonical(message: Mapping[str, Any]) -> JsonObject:
    """Return an assistant message in the one form in which answers are kept, whole or streamed.
    `role`, `content`, then the other fields by name; empty ones are left out. `content` is a text:
    empty when the answer says nothing, null when it says something elsewhere (a tool call, a
    refusal, speech). `reasoning_content` is vLLM's older name of `reasoning`."""
    made: JsonObject = {"role": message.get("role") or "assistant"}
    made["content"] = message.get("content") or ""
    others = {
        key: value for key, value in message.items() if value not in _EMPTY and key not in made
    }
    thought = others.pop("reasoning_content", None)
    if thought is not None:
        others.setdefault("reasoning", thought)
    if not made["content"] and not others.keys().isdisjoint(_ELSEWHERE):
        made["content"] = None
    made.update(sorted(others.items()))
    return made


_EMPTY: Final[tuple[object, ...]] = (None, "", [], {})
_ELSEWHERE: Final = ("tool_calls", "refusal", "audio")


def dumped(value: Any) -> str:  # Any: JSON
    """Return arguments of a tool call as JSON text, as vLLM writes them."""
    return json.dumps(value, ensure_ascii=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def answer_text(message: Mapping[str, Any]) -> str:
    """Return the words of an assistant message: the text of its content, the text that a parser
    kept back (`WITHHELD`), its refusal, and the transcript of its speech."""
    content, audio = message.get("content"), message.get("audio")
    parts = content if isinstance(content, list) else [content]
    words = [part.get("text") if isinstance(part, dict) else part for part in parts]
    text = "\n".join(one for one in words if isinstance(one, str)) + (message.get(WITHHELD) or "")
    spoken = audio.get("transcript") if isinstance(audio, dict) else None
    more = (text, message.get("refusal"), spoken)
    return "\n".join(one for one in more if isinstance(one, str) and one)


def message_json(message: Mapping[str, Any]) -> bytes:
    """Return the canonical message as JSON for the record."""
    kept = canonical(message)
    try:
        return msgspec.json.encode(kept)
    except UnicodeEncodeError:  # a lone surrogate
        text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


# Read a reply of `/v1/messages` (Anthropic's API), whole or streamed. Pure.

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


class Usage(msgspec.Struct):
    output_tokens: int | None = None


class _Message(msgspec.Struct):
    content: list[_Block] = []
    model: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Usage | None = None
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
    usage: Usage | None = None


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
            (one, one.text or one.thinking or ("" if one.input is None else dumped(one.input)))
            for one in message.content
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
            delta = event.delta
            piece = delta.text or delta.thinking or delta.partial_json or ""
            _block(grown, event.index).pieces.append(piece)
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
