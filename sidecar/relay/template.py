"""Remove the sidecar's own fields from the usual event of a stream, by a template. Pure.

Reading an event as JSON takes five times as long as finding where the fields begin and end. So the
fields are searched for by marks: whole keys with the bytes around them. An event that has all marks
is edited at them; any other is read as JSON (`reply_edit.py`).

Why the marks are enough: quotes inside JSON strings are escaped, so a mark never occurs in text
that a model or a user wrote. One mark opens the list of `logprobs`, which is not empty; the first
closing mark behind it ends the list. vLLM names no other tokens when it was not asked for them, so
`top_logprobs` is empty in the first token and in the last one. The list does not end before that (a
list of objects ends with `}]`, and then a member follows or an object ends), and the object around
it ends with it. The ids must follow at once, so no member is between. A list of ids is digits and
commas up to its bracket. Only the delta, which is read as JSON, stands before the
log-probabilities; the events of one chat stream differ in one token, so the rest is compared byte
for byte with an event that was read as JSON.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sidecar.errors import UNREADABLE_JSON

_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)
"""Takes one value and nothing behind it."""
_DELTA: Final = b'"delta":'
_OPENS: Final = b',"logprobs":{"content":[{'
_LIST_END: Final = b'"top_logprobs":[]}]'
_END: Final = _LIST_END + b"}"
_MEMBER_BEHIND_LIST: Final = b'}],"'
_END_BEHIND_LIST: Final = b"}]}"
_CLOSES: Final = _END + b',"finish_reason":null,"token_ids":['
_ANY_IDS: Final = b'token_ids":'
"""The end of both names, `token_ids` and `prompt_token_ids`."""
_LOGPROBS: Final = b'"logprobs":'
_BEFORE_VALUE: Final = len(_LOGPROBS) + 1
_NULLS: Final = b',"logprobs":null,"finish_reason":null,"token_ids":null'
_EMPTY: Final = 2
"""Length of the delta of an event that only exists because token ids were asked for: `{}`."""
_ARRAY_END: Final = ord("]")
_COMMA: Final = ord(",")
_ZERO: Final = ord("0")
_NINE: Final = ord("9")


class EventShape:
    """What the usual events of one stream begin and end with."""

    def __init__(self, before: bytes, rest: bytes) -> None:
        """before: up to the delta. rest: from behind the token ids to the blank line, included."""
        self._before = before
        self._rest = rest

    def strip(self, event: bytes) -> bytes | None:
        """The event with `null` for log-probabilities and token ids. None: not a usual one."""
        before, rest = self._before, self._rest
        if not event.startswith(before) or not event.endswith(rest):
            return None
        opens = event.find(_OPENS, len(before))
        if opens <= len(before) + _EMPTY:
            return None
        closes = _list_end(event, opens)
        at = closes + len(_CLOSES)
        if closes < 0 or event[closes:at] != _CLOSES:
            return None
        if not _is_delta(event[len(before) : opens]):
            return None
        stop = len(event) - len(rest) - 1
        if at >= stop or event[stop] != _ARRAY_END:
            return None
        while at < stop:
            byte = event[at]
            if byte != _COMMA and (byte < _ZERO or byte > _NINE):
                return None
            at += 1
        return b"".join((event[:opens], _NULLS, rest))


def _list_end(data: bytes, opens: int) -> int:
    """Return where the closing bytes of a list of log-probabilities begin; -1 when the list is
    closed in another way. opens: where `_OPENS` begins the list."""
    closes = data.find(_LIST_END, opens)
    if closes < 0:
        return -1
    stop = closes + len(_LIST_END)
    ends = data.find(_MEMBER_BEHIND_LIST, opens, stop)
    if ends < 0:
        ends = data.find(_END_BEHIND_LIST, opens, stop)
    if ends < 0:
        return closes
    # Another list ends there, or the text of a token looks so.
    return closes if _is_value(data[opens + _BEFORE_VALUE : closes + len(_END)]) else -1


def _is_delta(value: bytes) -> bool:
    """Whether this is one value and nothing more, with none of our fields in it."""
    return value.find(_ANY_IDS) < 0 and value.find(_LOGPROBS) < 0 and _is_value(value)


def _is_value(value: bytes) -> bool:
    try:
        _VALUE.decode(value)
    except UNREADABLE_JSON:
        return False
    return True


def learn_shape(event: bytes, stripped: bytes) -> EventShape | None:
    """The shape of an event that was edited the careful way, if it is a usual one. stripped: what
    came of it."""
    delta = event.find(_DELTA)
    closes = event.find(_CLOSES, delta) if delta >= 0 else -1
    end = event.find(b"]", closes + len(_CLOSES)) if closes >= 0 else -1
    if end < 0:
        return None
    shape = EventShape(event[: delta + len(_DELTA)], event[end + 1 :])
    return shape if shape.strip(event) == stripped else None
