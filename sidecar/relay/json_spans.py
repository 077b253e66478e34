"""Where the members of a JSON object stand in its bytes, so that values can be cut out. Pure.

The fast way is one scan in C: msgspec gives the keys in order and each value's length, and the walk
below steps from one to the next. Every step is checked (key, value, delimiter), and where one
does not hold (a key that comes twice, a document msgspec refuses, if only for its depth) the
object is scanned byte by byte instead. Both give the same spans; a test compares them.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import msgspec

from sidecar.errors import UNREADABLE_JSON

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^ \t\n\r,\]}]+")
_BRACKETS = re.compile(rb"[\[\]{}]")
_BACKSLASH = ord("\\")
_SCANNER = json.JSONDecoder(parse_int=float, strict=False)
"""Finds the end of a container in C. It is given bytes as Latin-1, a character for each, and makes
floats of integers, which may then be as long as they like."""


class Member(NamedTuple):
    """One `key: value`; `data[start:end]` is the value."""

    key: str
    start: int
    end: int


class _OutOfStepError(Exception):
    """The fast walk lost its place; never leaves this module."""


def members(data: bytes, start: int = 0, end: int | None = None) -> list[Member]:
    """The members of the object that is `data[start:end]`, in order, twice-named ones included.

    data: must be valid JSON there, as Python's json sees it (NaN and lone surrogates allowed).
    Raises: ValueError when there is no object.
    """
    stop = len(data) if end is None else end
    try:
        return _walk(data, start, stop)
    except (_OutOfStepError, *UNREADABLE_JSON, IndexError):
        return _scan(data, start)


def elements(data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    """The spans of the elements of the array that is `data[start:end]`, valid as for `members`."""
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
        # A value that only begins alike is told by what follows it.
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
    text = data.decode("latin-1")
    at = _skip_space(data, data.index(b"{", start) + 1)
    while data[at] != ord("}"):
        key_end = _string_end(data, at)
        value = _skip_space(data, _skip_space(data, key_end) + 1)
        end = _value_end(data, value, text)
        found.append(Member(_key(data, at, key_end), value, end))
        at = _skip_space(data, end)
        if data[at] == ord(","):
            at = _skip_space(data, at + 1)
    return found


def _scan_elements(data: bytes, start: int) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    text = data.decode("latin-1")
    at = _skip_space(data, data.index(b"[", start) + 1)
    while data[at] != ord("]"):
        end = _value_end(data, at, text)
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
    """One past the closing quote of the string that opens at `quote`."""
    at = quote
    while True:
        at = data.index(b'"', at + 1)
        back = at - 1
        while data[back] == _BACKSLASH:
            back -= 1
        if (at - back) % 2 == 1:  # an even number of backslashes escapes nothing
            return at + 1


def _value_end(data: bytes, start: int, text: str) -> int:
    """As `value_end`. text: the same as Latin-1."""
    if data[start] not in b"{[":
        return value_end(data, start)
    try:
        return _SCANNER.raw_decode(text, start)[1]
    except UNREADABLE_JSON:  # nested too deep
        return _container_end(data, start)


def value_end(data: bytes, start: int) -> int:
    """One past the JSON value that begins at `start`. Raises: ValueError when it does not end."""
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
    depth, at = 0, start
    while True:
        quote = data.find(b'"', at)
        stop = len(data) if quote < 0 else quote
        for bracket in _BRACKETS.finditer(data, at, stop):
            depth += 1 if bracket[0] in b"{[" else -1
            if depth == 0:
                return bracket.end()
        if quote < 0:
            raise ValueError(f"the JSON container at byte {start} does not end")
        at = _string_end(data, quote)
