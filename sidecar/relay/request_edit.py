"""Find the byte span of each member of a JSON object, so that values can be replaced. Pure.

The fast way is one scan in C: msgspec returns the keys in order and the length of each value, and
`_walk` computes the spans from them. It checks each key, value and delimiter. When a check fails (a
key occurs twice, or msgspec refuses the document, for example because it is nested too deep),
`_scan` reads the object member by member instead. Both give the same spans; a test compares them.

The end of an array or object is found without a Python step for each bracket or string: C code
counts the brackets of one piece at a time, so an odd document costs little more than a plain one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.relay.fields import FRONT, TAIL

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^ \t\n\r,\]}]+")
_BRACKETS = re.compile(rb"[\[\]{}]")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BACKSLASH = ord("\\")
_SIGNS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Replaces an opening bracket by the byte +1 and a closing one by -1: the change of depth."""
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_LEAST_PIECE: Final = 64
"""Length in bytes of the last piece, which is searched bracket by bracket."""
_LONGEST_PIECE: Final = 16 * 1024


class Member(NamedTuple):
    """One `key: value`; `data[start:end]` is the value."""

    key: str
    start: int
    end: int


class _OutOfStepError(Exception):
    """A check of the fast walk failed. Never leaves this module."""


def members(data: bytes, start: int = 0, end: int | None = None) -> list[Member]:
    """List the members of the object at `data[start:end]` in order, each repeated key included. It
    is valid JSON for Python's json (NaN and lone surrogates are allowed). Raises: ValueError when
    there is no object."""
    stop = len(data) if end is None else end
    try:
        return _walk(data, start, stop)
    except (_OutOfStepError, *UNREADABLE_JSON, IndexError):
        return _scan(data, start)


def elements(data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    """List the spans of the elements of the array at `data[start:end]`, valid as for `members`."""
    try:
        lengths = [len(raw) for raw in _ARRAY.decode(memoryview(data)[start:end])]
    except UNREADABLE_JSON:
        return _scan_elements(data, start)
    spans: list[tuple[int, int]] = []
    at = _skip_space(data, start) + 1
    for length in lengths:
        at = _skip_space(data, at)
        spans.append((at, at + length))
        at = _skip_space(data, at + length) + 1  # the comma
    return spans


def _walk(data: bytes, start: int, stop: int) -> list[Member]:
    found: list[Member] = []
    at = data.index(b"{", start, stop) + 1
    for key, raw in _OBJECT.decode(memoryview(data)[start:stop]).items():
        quote = _skip_space(data, at)
        key_end = _string_end(data, quote)
        if _key(data, quote, key_end) != key:
            raise _OutOfStepError
        value = _skip_space(data, _skip_space(data, key_end) + 1)
        at = value + len(raw)
        # A longer value with the same beginning fails the check of the delimiter below.
        if data[value:at] != bytes(raw):
            raise _OutOfStepError
        found.append(Member(key, value, at))
        at = _skip_space(data, at)
        if data[at] not in b",}":
            raise _OutOfStepError
        at += 1
    if found and data[at - 1] != ord("}"):
        raise _OutOfStepError
    return found


def _scan(data: bytes, start: int) -> list[Member]:
    found: list[Member] = []
    at = _skip_space(data, data.index(b"{", start) + 1)
    while data[at] != ord("}"):
        key_end = _string_end(data, at)
        value = _skip_space(data, _skip_space(data, key_end) + 1)
        end = value_end(data, value)
        found.append(Member(_key(data, at, key_end), value, end))
        at = _skip_space(data, end)
        if data[at] == ord(","):
            at = _skip_space(data, at + 1)
    return found


def _scan_elements(data: bytes, start: int) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    at = _skip_space(data, data.index(b"[", start) + 1)
    while data[at] != ord("]"):
        end = value_end(data, at)
        spans.append((at, end))
        at = _skip_space(data, end)
        if data[at] == ord(","):
            at = _skip_space(data, at + 1)
    return spans


def _key(data: bytes, quote: int, end: int) -> str:
    text = data[quote + 1 : end - 1]
    try:
        if _BACKSLASH not in text:
            return text.decode("utf-8", "surrogatepass")
        decoded: str = json.loads(data[quote:end].decode("utf-8", "surrogatepass"))
        return decoded
    except UnicodeDecodeError:  # vLLM refuses such a body itself; the key is none of ours
        return text.decode("latin-1")


def _skip_space(data: bytes, at: int) -> int:
    if data[at] > 0x20:  # vLLM and most clients write none
        return at
    match = _SPACE.match(data, at)
    return match.end() if match else at


def _string_end(data: bytes, quote: int) -> int:
    """Return the index after the closing quote of the string that opens at `quote`."""
    at = data.index(b'"', quote + 1)
    if data[at - 1] != _BACKSLASH:
        return at + 1
    match = _STRING.match(data, quote)
    if match is None:
        raise ValueError(f"the JSON string at byte {quote} does not end")
    return match.end()


def value_end(data: bytes, start: int) -> int:
    """Return the index after the JSON value at `start`. Raises: ValueError when it does not end."""
    first = data[start]
    if first == ord('"'):
        return _string_end(data, start)
    if first in b"{[":
        return _container_end(data, start)
    match = _SCALAR.match(data, start)
    if match is None:
        raise ValueError(f"no JSON value at byte {start}")
    return match.end()


def _container_end(data: bytes, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`. The search goes through
    pieces of growing length until one contains the end, and then through that piece in smaller
    ones. Every piece begins outside of strings."""
    depth, at, size, grows = 1, start + 1, _LEAST_PIECE, True
    while at < len(data):
        stop = at + size
        signs, open_quote = _signs(data[at:stop])
        closing = signs.count(b"\xff")
        if closing >= depth and depth + _lowest(signs) <= 0:
            if size <= _LEAST_PIECE:
                return _near_end(data, at, depth)
            size //= 2
            grows = False
            continue
        depth += len(signs) - 2 * closing
        at = stop if open_quote < 0 else _string_end(data, at + open_quote)
        if grows and size < _LONGEST_PIECE:
            size *= 2
    raise ValueError(f"the JSON container at byte {start} does not end")


def _signs(piece: bytes) -> tuple[bytes, int]:
    """Return the brackets outside of strings as `_SIGNS`, and the index of the quote whose string
    continues after the piece; -1 when no string does."""
    if piece.find(b"\\") >= 0:  # an escaped quote ends no string; the replacements keep all indexes
        piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    parts = piece.split(b'"')
    outside = b"".join(parts[::2]) if len(parts) > 1 else piece
    open_quote = piece.rfind(b'"') if len(parts) % 2 == 0 else -1
    return outside.translate(_SIGNS, _NO_BRACKETS), open_quote


def _lowest(signs: bytes) -> int:
    """Return the lowest depth that the signs reach, from 0 at their beginning."""
    lowest: int = min(accumulate(memoryview(signs).cast("b")))
    return lowest


def _near_end(data: bytes, start: int, depth: int) -> int:
    """Like `_container_end`, but bracket by bracket. The end is within `_LEAST_PIECE` bytes."""
    at = start
    while True:
        quote = data.find(b'"', at)
        stop = len(data) if quote < 0 else quote
        for bracket in _BRACKETS.finditer(data, at, stop):
            depth += 1 if bracket[0] in b"{[" else -1
            if depth == 0:
                return bracket.end()
        at = _string_end(data, quote)


# Edit a request: the adapter's name, and what only the sidecar asks for. Pure.

MODEL: Final = "model"
TOKEN_IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
STREAM_OPTIONS: Final = "stream_options"
CHECKED_BYTES: Final = 16 * 1024
"""A body up to this size is searched for a second `model`; in a longer one the search costs more
than the scan. An unseen second one must have the same value (msgspec reads the last one); then the
base answers and the exchange is marked `model_mismatch`."""
JOINED_BYTES: Final = 64 * 1024
"""A body up to this size is copied to join it with its edits and its head, which is cheaper than
to send it in pieces."""
SCANNED_BYTES: Final = 64 * 1024
"""A body up to this size is edited member by member, at a few microseconds each."""
MAX_CANDIDATES: Final = 3
"""Occurrences of `"model"`, from the end, that are tried: some may belong to an inner object."""
MAX_FRONT_BYTES: Final = 512
"""Bytes at a long body's beginning in which `model` is searched for first."""
_FIRST: Final = b'{"model":'
_KEY: Final = b'"model"'
_SPACES: Final = b" \t\r\n"


class PiecedBody:
    """A long body in pieces, which are mostly views of the memory it was read into."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces = pieces
        self.length = sum([len(piece) for piece in pieces])


def edit_request(body: bytes, wanted: Mapping[str, bytes]) -> bytes:
    """Set the members in `wanted` (name to JSON): at their place, in front when they are missing.
    A member that occurs twice is set in both places. In a body longer than `SCANNED_BYTES` they go
    to the end: of two members with one name, vLLM's reader (Python's json) takes the last."""
    head = body.index(b"{") + 1
    if len(body) > SCANNED_BYTES:
        end = body.rindex(b"}")
        comma = b"," if body[head:end].strip(_SPACES) else b""
        return b"".join((body[:end], comma, _json_members(wanted), body[end:]))
    missing = dict(wanted)
    pieces: list[bytes] = []
    at = head
    found = members(body)
    for member in found:
        value = wanted.get(member.key)
        if value is not None:
            missing.pop(member.key, None)
            pieces += (body[at : member.start], value)
            at = member.end
    pieces.append(body[at:])
    new = _json_members(missing)
    comma = b"," if new and found else b""
    return b"".join((body[:head], new, comma, *pieces))


def _json_members(values: Mapping[str, bytes]) -> bytes:
    return b",".join([b'"%b":%b' % (key.encode(), value) for key, value in values.items()])


def splice_request(
    body: bytes, old: bytes, new: bytes, in_front: bytes
) -> bytes | PiecedBody | None:
    """Do what `edit_request` does for the usual body, in a fraction of the time. old: the bytes of
    `model`'s value in the body. new: its replacement, JSON. in_front: finished members with a comma
    after each, none of which is in the body. Returns: None when `model`'s place is not certain."""
    if body[:1] != b"{":
        return None
    if body.startswith(_FIRST):
        at = len(_FIRST)
        if len(body) <= CHECKED_BYTES and body.find(_KEY, at) >= 0:
            return None
    else:
        key = _place(body, old)
        if key < 0:
            return None
        at = key + len(_KEY) + 1
    if body[at : at + 1] == b" ":
        at += 1
    end = at + len(old)
    if body[at:end] != old:
        return None
    if len(body) <= JOINED_BYTES:
        return b"".join((b"{", in_front, body[1:at], new, body[end:]))
    view = memoryview(body)
    return PiecedBody((b"{" + in_front, view[1:at], new, view[end:]))


def _place(body: bytes, old: bytes) -> int:
    """Find the body's own member `model` with the value `old`. Returns: its index, or -1."""
    if len(body) > CHECKED_BYTES:
        key = body.find(_KEY, 0, MAX_FRONT_BYTES)
        if key >= 0 and _follows_members(body[:key]):
            return key
    key = body.rfind(_KEY)
    for _ in range(MAX_CANDIDATES):
        if key < 0 or _is_member(body, key, old):
            return key
        key = body.rfind(_KEY, 0, key)
    return -1


def _follows_members(front: bytes) -> bool:
    """True if `front` is `{` and whole members, so that a member of the body itself comes next."""
    before = front.rstrip(_SPACES)
    if before == b"{":
        return True
    try:
        FRONT.decode(before[:-1] + b"}")
    except UNREADABLE_JSON:
        return False
    return before.endswith(b",")


def _is_member(body: bytes, key: int, value: bytes) -> bool:
    """True if the body's own member `model` with this value begins at `key`: the bytes from there
    must be the rest of one object, no more and no less."""
    try:
        return bytes(TAIL.decode(b"{" + body[key:]).model) == value
    except UNREADABLE_JSON:
        return False
