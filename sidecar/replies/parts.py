"""What is read out of a reply, the same for every surface. Pure.

Each surface has a reader of its own (`reply_choices.py`, `reply_items.py`, `reply_blocks.py`), and
all of them give this: assistant messages in the form of chat completions, and what was said of the
sampling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from sidecar.errors import UNREADABLE_JSON

JsonObject = dict[str, Any]  # Any: vLLM's message, kept as it is
_BLOCK = 65_536
"""Bytes of a stream that are put together at once: larger pieces are faster by nothing, and each
piece keeps the interpreter from the relay's thread while it is copied and split."""
_DONE = b"[DONE]"

Document = TypeVar("Document")


class UnreadableReplyError(Exception):
    """The reply is not what a reply of this surface looks like; stays inside the capture."""


class ReadChoice(msgspec.Struct, gc=False):
    """One answer, as far as it was seen."""

    message: JsonObject
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """vLLM's: the stop string or stop token that ended it; None at the usual end token."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    token_texts: list[str] = []
    """[S] each sampled token's text, as the log-probabilities give it."""


class ReadReply(msgspec.Struct, gc=False):
    """What a reply says, whole or streamed."""

    models: set[str] = set()
    """Every model name it gives: one, if all is well."""
    choices: dict[int, ReadChoice] = {}
    prompt_token_ids: tuple[int, ...] = ()
    several_prompts: bool = False
    """A completion of a list of prompts: the answers belong to different ones."""
    completion_tokens: int | None = None
    error: str | None = None
    """The error with which vLLM ends a stream that broke."""
    ended: bool = False
    """A whole reply, or a stream that reached what ends it on its surface."""


def documents(chunks: Sequence[bytes]) -> Iterator[bytes]:
    """The `data` of each event of a stream, which may be cut anywhere. An event that has no blank
    line behind it was cut off and does not count. `[DONE]` is given as it is, a space before it
    perhaps (`is_done`).

    Every data line is a document: vLLM writes its replies on one line.
    """
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
        # An event longer than a block is not copied again and again, but at each doubling.
        pending, size, wanted = [rest], len(rest), max(_BLOCK, 2 * len(rest))
    block = b"".join(pending)
    yield from _data_lines(block[: _last_blank_line(block)])


def _last_blank_line(block: bytes) -> int:
    """Where the bytes behind the last blank line begin; 0 when there is none."""
    plain = block.rfind(b"\n\n")
    # Looking for what is not there goes through all of the block; one byte is found much faster.
    spelled = block.rfind(b"\n\r\n") if b"\r" in block else -1
    return max(plain + 2 if plain >= 0 else 0, spelled + 3 if spelled >= 0 else 0)


def _data_lines(events: bytes) -> list[bytes]:
    return [line[5:] for line in events.split(b"\n") if line.startswith(b"data:")]


def is_done(document: bytes) -> bool:
    """Whether this is the mark that ends a stream of chat or text completions."""
    return len(document) <= len(_DONE) + 2 and document.strip() == _DONE


def decode(decoder: msgspec.json.Decoder[Document], data: bytes) -> Document:
    """Decode one document of vLLM's. Raises: UnreadableReplyError.

    msgspec refuses NaN and lone surrogates, which vLLM's side of JSON can write: what it refuses
    is read once more the slow way, by Python's json.
    """
    try:
        return decoder.decode(data)
    except UNREADABLE_JSON:
        return _decode_slowly(decoder, data)


def _decode_slowly(decoder: msgspec.json.Decoder[Document], data: bytes) -> Document:
    try:
        value = json.loads(data.decode("utf-8", "replace"))
        return msgspec.convert(value, decoder.type)
    except UNREADABLE_JSON as error:
        raise UnreadableReplyError(str(error)) from error


def message_json(message: JsonObject) -> bytes:
    """The message as it is recorded: role, content, then what else it has; no empty members."""
    kept: JsonObject = {
        "role": message.get("role", "assistant"),
        "content": message.get("content"),
    }
    for key, value in message.items():
        if value is not None and value != [] and key not in kept:
            kept[key] = value
    if not kept["content"] and "tool_calls" in kept:
        kept["content"] = None  # whole replies say null, streams "", and both mean no text
    try:
        return msgspec.json.encode(kept)
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
