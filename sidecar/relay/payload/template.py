"""Take the sidecar's own fields out of the usual reply, and the usual event, by their shape. Pure.

To read a reply as JSON takes five times as long as to find where the fields begin and end. So they
are looked for by marks, whole keys with what stands around them, and what has all its marks is
edited there; anything else is read as JSON (`reply_edit.py`).

Why that is enough: quotes inside JSON strings are escaped, so a mark is never found in what a model
or a user wrote. One mark opens the list of `logprobs`, which is not empty, and the first one of
another kind behind it closes it: vLLM names no other tokens when it was not asked for them, so the
first token has none and the last one has none. The list does not end before that (a list of objects
ends with `}]`, and then a member follows or an object ends), and the object that it is in ends with
it. What must stand behind it stands right there, so no member is between. A list of ids is digits
and commas up to its bracket. A reply has each of our keys once, so there is no second choice with
one. In an event nothing but the delta, which is read as JSON, stands before the log-probabilities;
the events of one chat stream differ in one token, so of those the rest is compared to the byte with
an event that was read as JSON.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sidecar.errors import UNREADABLE_JSON

_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)
"""Takes one value and nothing behind it."""
_DELTA: Final = b'"delta":'
_OPENS: Final = b',"logprobs":{"content":[{'
_TOP: Final = b'"top_logprobs":['
_LIST_END: Final = b'"top_logprobs":[]}]'
_END: Final = _LIST_END + b"}"
_MEMBER_BEHIND_LIST: Final = b'}],"'
_END_BEHIND_LIST: Final = b"}]}"
_CLOSES: Final = _END + b',"finish_reason":null,"token_ids":['
_FINISH: Final = _END + b',"finish_reason":'
_ANY_IDS: Final = b'token_ids":'
"""Of the answer or of the prompt."""
_LOGPROBS: Final = b'"logprobs":'
_BEFORE_VALUE: Final = len(_LOGPROBS) + 1
_IDS: Final = b',"token_ids":['
_PROMPT_IDS: Final = b',"prompt_token_ids":['
_NULL: Final = b"null"
_ID_BYTES: Final = b"0123456789,"
_NEAR: Final = 400
"""Between the end of the log-probabilities and the ids: two reasons why the answer ended."""
_NULLS: Final = b',"logprobs":null,"finish_reason":null,"token_ids":null'
_EMPTY: Final = 2
"""Length of the delta of an event that only exists because token ids were asked for: `{}`."""
_ARRAY_END: Final = ord("]")
_COMMA: Final = ord(",")
_ZERO: Final = ord("0")
_NINE: Final = ord("9")


class EventShape:
    """What the usual events of one stream begin and end with."""

    __slots__ = ("_before", "_rest")

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
    """Where the end begins of the list of log-probabilities that `_OPENS` opens; -1: it ends in
    another way, or ends before."""
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
    """The shape of an event that was edited the careful way, if it is a usual one.

    stripped: what came of it, with log-probabilities and token ids taken out.
    """
    delta = event.find(_DELTA)
    closes = event.find(_CLOSES, delta) if delta >= 0 else -1
    end = event.find(b"]", closes + len(_CLOSES)) if closes >= 0 else -1
    if end < 0:
        return None
    shape = EventShape(event[: delta + len(_DELTA)], event[end + 1 :])
    return shape if shape.strip(event) == stripped else None


def strip_usual_reply(reply: bytes) -> bytes | None:
    """A whole chat reply of one answer with `null` for log-probabilities, ids of the answer and ids
    of the prompt. None: not a usual one."""
    if reply.count(_LOGPROBS) != 1 or reply.count(_ANY_IDS) != 2:
        return None
    opens = reply.find(_LOGPROBS) - 1
    if opens < 0 or not reply.startswith(_OPENS, opens):
        return None
    top = reply.find(_TOP, opens) + len(_TOP)
    closes = _list_end(reply, opens)
    if closes < 0 or reply[top] != _ARRAY_END or not reply.startswith(_FINISH, closes):
        return None
    closes += len(_END)
    ids = reply.find(_IDS, closes, closes + _NEAR) + len(_IDS)
    ids_end = reply.find(b"]", ids)
    if ids < len(_IDS) or ids_end < 0 or reply[ids:ids_end].translate(None, _ID_BYTES):
        return None
    prompt = reply.find(_PROMPT_IDS, ids_end) + len(_PROMPT_IDS)
    prompt_end = reply.find(b"]", prompt)
    if prompt < len(_PROMPT_IDS) or prompt_end < 0:
        return None
    if reply[prompt:prompt_end].translate(None, _ID_BYTES):
        return None
    return b"".join(
        (
            reply[: opens + 1],
            _LOGPROBS,
            _NULL,
            reply[closes : ids - 1],
            _NULL,
            reply[ids_end + 1 : prompt - 1],
            _NULL,
            reply[prompt_end + 1 :],
        )
    )
