"""Remove from a reply what only the sidecar asked for. Pure.

vLLM writes the keys `prompt_token_ids`, `token_ids` and `logprobs` whether they were asked for or
not, and `null` where they were not. So the reply that the client would have had is this one with
those values replaced by `null`, and every other byte as it is.
Streams have two more traces: when token ids are asked for, vLLM sends an event for a token that a
parser is still holding back (`"delta":{}`), which it would not have sent otherwise; and usage, when
that is asked for, comes in an event of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET, Raw, UnsetType

from sidecar.errors import UNREADABLE_JSON
from sidecar.relay.fields import REPLY, ReplyFields
from sidecar.relay.request_edit import Member, elements, members
from sidecar.replies.choices import cut_prompts

MAX_HELD_BYTES = 64 * 2**20  # not Final, which would compile it in: tests make it small
"""A reply, or one event, longer than this goes on unedited: it is valid, and carries fields more
than the client asked for. vLLM writes about 110 bytes a token, so this is half a million tokens."""
CHECKED_BYTES: Final = 2**20
"""A reply that msgspec cannot read is checked to be JSON up to this length: 10 ms and 20 MB."""
NULL: Final = b"null"
_PROMPT_IDS: Final = b'"prompt_token_ids"'
_IDS: Final = b'"token_ids"'
_LOGPROBS: Final = b'"logprobs"'
_COLON: Final = ord(":")
_MODEL_KEYS: Final = (b'"model":', b'"model": ')
"""As vLLM's servers write it, and Python's `json`."""
_BACKSLASH: Final = b"\\"
_ESCAPED_ASCII: Final = b"\\u00"
"""A name that needs no escape may be written with some. vLLM escapes control characters alone."""
_NO_DELTA: Final = b"{}"
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Strip:
    """The fields of a reply that the client did not ask for."""

    token_ids: bool
    logprobs: bool
    usage: bool = False
    """In a stream: the event with the usage."""

    @property
    def nothing(self) -> bool:
        return not (self.token_ids or self.logprobs or self.usage)

    @property
    def everything(self) -> bool:
        return self.token_ids and self.logprobs


STRIP_NOTHING: Final = Strip(token_ids=False, logprobs=False)
STRIP_USUAL: Final = Strip(token_ids=True, logprobs=True)


class _NotCertainError(Exception):
    """The fast search is not certain of a place. Never leaves this module."""


def strip_reply(body: bytes, strip: Strip) -> bytes:
    """Return a whole reply without what `strip` names. Other bytes are returned unchanged."""
    short = _shortened(body, strip)
    try:
        return _replace(short, _spans(short, REPLY.decode(short), strip))
    except (_NotCertainError, *UNREADABLE_JSON):
        return _strip_any_reply(body, strip)


def _shortened(data: bytes, strip: Strip) -> bytes:
    """Take the ids of the prompt out unread: of 1 MB of prompt they are 1.5 MB, and reading and
    comparing them took half of the proxy's time (docs/log.md). Whether they were the right ones,
    `_spans` finds out, as of a `null` that vLLM wrote."""
    return cut_prompts(data)[0] if strip.token_ids else data


def _strip_any_reply(body: bytes, strip: Strip) -> bytes:
    """As `strip_reply`, member by member: for any spelling and any depth."""
    try:
        cuts, _ = _cuts(body, 0, len(body), strip)
    except (ValueError, IndexError):
        return body
    return _replace(body, cuts)


def strip_event(event: bytes, strip: Strip) -> bytes:
    """Return an event, blank line included; b"" when it exists only because the sidecar asked.
    Comments, `[DONE]`, and events of more than one data line, which vLLM does not write, stay."""
    if event[:7] == b"data: {" and event[-3:] == b"}\n\n" and event.find(b"\n", 0, -2) < 0:
        short = _shortened(event, strip)
        try:
            reply = REPLY.decode(short[6:-2])
            if _exists_for_us(reply, strip):
                return b""
            return _replace(short, _spans(short, reply, strip))
        except (_NotCertainError, *UNREADABLE_JSON):
            return _strip_any_event(event, strip)
    return _strip_any_event(event, strip)


def renamed(data: bytes, names: tuple[bytes, bytes]) -> bytes:
    """Return whole events, or a whole reply, with another `model`. names: the old and the new one,
    as JSON. A quotation mark inside a string is escaped, so no text of a model matches."""
    old, new = names
    if data.find(old) < 0:
        return data
    for key in _MODEL_KEYS:
        data = data.replace(key + old, key + new)
    return data


def _exists_for_us(reply: ReplyFields, strip: Strip) -> bool:
    choices = reply.choices
    if choices is UNSET:
        return False
    if not choices:
        return strip.usage and reply.usage is not UNSET
    choice = choices[0]
    return (
        choice.delta is not UNSET
        and len(choice.delta) == len(_NO_DELTA)
        and bytes(choice.delta) == _NO_DELTA
        and len(choices) == 1
        and strip.everything
        and choice.finish_reason is not UNSET
        and bytes(choice.finish_reason) == NULL
    )


def _spans(data: bytes, reply: ReplyFields, strip: Strip) -> Spans:
    """The spans of the values that `strip` names, in order. Raises: _NotCertainError. The values
    are known; each is searched for by its key. A key is never found inside a string, because quotes
    in strings are escaped. It is the key of that value, and not one of the same name that stands
    deeper, when the name is found as often as there are values and no key is spelled with an
    escape."""
    # One byte is found ten times as fast as four.
    if data.find(_BACKSLASH) >= 0 and data.find(_ESCAPED_ASCII) >= 0:
        raise _NotCertainError
    choices = reply.choices or ()
    spans: Spans = []
    if strip.logprobs:
        _find(data, _LOGPROBS, [choice.logprobs for choice in choices], spans)
    if strip.token_ids:
        _find(data, _IDS, [choice.token_ids for choice in choices], spans)
        if reply.prompt_token_ids is UNSET:
            _find(data, _PROMPT_IDS, [choice.prompt_token_ids for choice in choices], spans)
        else:
            _find(data, _PROMPT_IDS, (reply.prompt_token_ids,), spans)
    if len(spans) > 1:
        spans.sort()
    return spans


def _find(
    data: bytes, key: bytes, values: list[Raw | UnsetType] | tuple[Raw], spans: Spans
) -> None:
    at = 0
    for value in values:
        if value is UNSET:
            continue
        at = data.find(key, at) + len(key) + 1
        raw = bytes(value)
        end = at + len(raw)
        if at <= len(key) or data[at - 1] != _COLON or data[at:end] != raw:
            raise _NotCertainError
        if raw != NULL:
            spans.append((at, end))
        at = end
    if data.find(key, at) >= 0:
        raise _NotCertainError


def _strip_any_event(event: bytes, strip: Strip) -> bytes:
    """As `strip_event`, member by member: for any spelling."""
    if not event.startswith(b"data:"):
        return event
    end = event.find(b"\n")
    line_end = len(event) if end < 0 else end
    start = event.find(b"{", 5, line_end)
    if start < 0 or event[5:start].strip() or b"\ndata:" in event:
        return event
    try:
        cuts, only_ours = _cuts(event, start, line_end, strip)
    except (ValueError, IndexError):
        return event
    return b"" if only_ours else _replace(event, cuts)


def _cuts(data: bytes, start: int, end: int, strip: Strip) -> tuple[Spans, bool]:
    """The spans to replace by null, in order, and whether the event exists only for the sidecar.
    Raises: ValueError or IndexError for what is no reply."""
    if end - start <= CHECKED_BYTES:
        with contextlib.suppress(RecursionError):  # too deep for this reader, not for vLLM's writer
            json.loads(data[start:end], parse_int=str)  # `int` takes no more than 4,300 digits
    cuts: Spans = []
    only_ours = has_usage = no_choices = False
    for member in members(data, start, end):
        if member.key == "prompt_token_ids" and strip.token_ids:
            cuts.append((member.start, member.end))
        elif member.key == "usage":
            has_usage = True
        elif member.key == "choices":
            if data[member.start] != ord("["):
                raise ValueError("choices is no array")
            spans = elements(data, member.start, member.end)
            if any(data[first] != ord("{") for first, _ in spans):
                raise ValueError("a choice is no object")
            choices = [members(data, *span) for span in spans]
            no_choices = not choices
            only_ours = strip.everything and len(choices) == 1 and _is_held_back(data, choices[0])
            for choice in choices:
                cuts += _choice_cuts(choice, strip)
    return cuts, only_ours or (no_choices and has_usage and strip.usage)


def _choice_cuts(choice: list[Member], strip: Strip) -> Iterator[tuple[int, int]]:
    for member in choice:
        ids = member.key in ("token_ids", "prompt_token_ids") and strip.token_ids
        if ids or (member.key == "logprobs" and strip.logprobs):
            yield (member.start, member.end)


def _is_held_back(data: bytes, choice: list[Member]) -> bool:
    values = {member.key: data[member.start : member.end] for member in choice}
    return values.get("delta") == b"{}" and values.get("finish_reason") == NULL


def _replace(data: bytes, cuts: Spans) -> bytes:
    if not cuts:
        return data
    if len(cuts) == 2:  # every event of a stream
        (a, b), (c, d) = cuts
        return b"".join((data[:a], NULL, data[b:c], NULL, data[d:]))
    pieces: list[bytes] = []
    at = 0
    for start, end in cuts:
        pieces += (data[at:start], NULL)
        at = end
    pieces.append(data[at:])
    return b"".join(pieces)


# Tell from the bytes of a reply whether it is empty and how it ended. Pure.

_FIELD: Final = (
    rb'("(?:content|text|delta|arguments|partial_json|refusal)"\s*:\s*")(?:\s|\\[nrtbf])*+'
)
"""A text field of an answer, up to its first character that is not white space. Reasoning alone is
no answer; its fields have other names in chat (`reasoning_content`) and messages."""
_SAYS: Final = re.compile(
    _FIELD + rb'[^"\\]|' + _FIELD + rb"\\[^nrtbf]"
    rb'|"type"\s*:\s*"(?:tool_use|function_call)"|"tool_calls"\s*:\s*\[\s*\{'
)
"""A text that is not only white space, or a tool call."""
_BEGINS: Final = re.compile(_FIELD + rb"(\\?)\Z")
"""A text field at the end of a piece that has only white space so far."""
_FAILS: Final = re.compile(rb'(?:^|\n)(?:data: \{"error"|event: error|event: response\.failed)')
"""The events with which vLLM reports a failure in a stream. JSON strings contain no line feed, so
no text of a model matches."""
_LIMIT: Final = re.compile(
    rb'"(?:finish_reason|stop_reason|status)"\s*:\s*"(?:length|max_tokens|incomplete)"'
)
_FAIL_WORDS: Final = (b'data: {"error"', b"event: error", b"event: response.failed")
_LIMIT_WORDS: Final = (b'"length"', b'"max_tokens"', b'"incomplete"')
"""What every match of `_FAILS` and `_LIMIT` contains. Searching a 1 kB reply for a word takes
0.1 us, and for an expression 10 us."""
_CONTENT: Final = b'"content":"'
_LOOKED_AT: Final = 16
"""Bytes of a text field that are looked at: replies begin with a space or two."""
_NO_TEXT: Final = b'"\\'
"""A text field that goes on like this, or is cut here, may say nothing yet."""
_OVERLAP: Final = 64
"""Bytes of a piece that are searched again with the next one: a field may be split between them."""


class ReplySigns:
    """The signs of one reply. Call `feed` with each piece of its body."""

    def __init__(self) -> None:
        self._rest = b""
        self.says_something = False
        self.cut_short = False
        """The token limit ended the reply."""
        self.failed = False
        """The stream contains an error event of vLLM."""
        self.slow = False
        """The first byte came late. The relay sets and counts it."""

    def feed(self, data: bytes) -> None:
        seen = self._rest + data
        self._rest = seen[-_OVERLAP:]
        if not self.says_something:
            self.says_something = _has_content(seen) or _SAYS.search(seen) is not None
            begun = None if self.says_something else _BEGINS.search(seen)
            if begun is not None:  # the white space may be longer than the overlap
                self._rest = begun[1] + begun[2]
        if not self.cut_short and _has_one(seen, _LIMIT_WORDS):
            self.cut_short = _LIMIT.search(seen) is not None
        if not self.failed and _may_fail(seen):
            self.failed = _FAILS.search(seen) is not None


def _has_content(data: bytes) -> bool:
    """True if the first `content` begins with text, as in nearly every chat reply: the expression
    takes 7 us to find that out."""
    at = data.find(_CONTENT)
    begin = data[at + len(_CONTENT) : at + len(_CONTENT) + _LOOKED_AT].lstrip()[:1]
    return at >= 0 and begin not in _NO_TEXT


def _may_fail(data: bytes) -> bool:
    """True if a failure may be in it. They begin a line, and a whole reply is one line."""
    return (data.find(b"\n") >= 0 or data[:1] in b"de") and _has_one(data, _FAIL_WORDS)


def _has_one(data: bytes, words: tuple[bytes, ...]) -> bool:
    return any(data.find(word) >= 0 for word in words)
