"""What is read from a reply, in one form for all surfaces. Pure.

Each kind of surface has a reader (`choices.py`, `items.py`, `blocks.py`). All return assistant
messages in the form of chat completions, and what vLLM reported about the sampling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

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
    prompt_token_ids: tuple[int, ...] = ()
    several_prompts: bool = False
    """The request was a list of prompts: the answers belong to different prompts."""
    completion_tokens: int | None = None
    error: str | None = None
    """The error with which vLLM ended a failed stream."""
    ended: bool = False
    """The reply is whole, or the stream reached the end mark of its surface."""


def documents(chunks: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the `data` of each event of a stream, which may be cut anywhere.

    An event without a blank line after it was cut off and is left out. `[DONE]` is yielded too,
    with a possible leading space (`is_done`). Every data line is one document, because vLLM writes
    its replies on one line.
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
    """Decode one JSON document from vLLM. Raises: UnreadableReplyError.

    msgspec refuses NaN and lone surrogates, which vLLM can write. Such a document is decoded again
    by Python's slower json.
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


def canonical(message: Mapping[str, Any]) -> JsonObject:
    """Return an assistant message in the one form in which answers are kept, whole or streamed.

    `role`, `content`, then the other fields by name; empty ones are left out. `content` is a text:
    empty when the answer says nothing, null when it says something elsewhere (a tool call, a
    refusal, speech). `reasoning_content` is vLLM's older name of `reasoning`.
    """
    others = {
        key: value
        for key, value in sorted(message.items())
        if key not in ("role", "content") and value not in (None, "", [], {})
    }
    thought = others.pop("reasoning_content", None)
    if thought is not None:
        others = dict(sorted({"reasoning": thought, **others}.items()))
    elsewhere = any(key in others for key in ("tool_calls", "refusal", "audio"))
    content = message.get("content") or (None if elsewhere else "")
    return {"role": message.get("role") or "assistant", "content": content, **others}


def dumped(value: Any) -> str:  # Any: JSON
    """Return arguments of a tool call as JSON text, as vLLM writes them."""
    return json.dumps(value, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Return True when a text is one JSON value."""
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
