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
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from sidecar.errors import UNREADABLE_JSON

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
    """List the members of the object at `data[start:end]` in order, each repeated key included.

    data: `data[start:end]` is valid JSON for Python's json (NaN and lone surrogates are allowed).
    Raises: ValueError when there is no object.
    """
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
    if _BACKSLASH not in text:
        return text.decode("utf-8", "surrogatepass")
    decoded: str = json.loads(data[quote:end].decode("utf-8", "surrogatepass"))
    return decoded


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
    """Return the index after the bracket that closes the one at `start`.

    The search goes through pieces of growing length until one contains the end, and then through
    that piece in smaller ones. Every piece begins outside of strings.
    """
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
