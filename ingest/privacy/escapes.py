r"""Find values in a text that holds escapes of JSON and is no JSON as a whole. Pure.

A tool result may have words before its JSON, several lines of JSON, or a cut end. An escape in it
hides a value: in `\n4111` a letter stands before the digits, in `a\u0040b.de` the `@` is missing.
Such a text is searched as it stands and with its escapes undone, once for each level of JSON in
JSON. Texts without a backslash are searched as they stand only.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ingest.privacy.detectors import Detectors, Found

MAX_LEVELS: Final = 4
"""Times that escapes are undone: JSON in JSON in a text takes two. Bounds the time."""
_ESCAPE: Final = re.compile(
    rb"\\(?:[\"'\\/bfnrt]"
    rb"|u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"
    rb"|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2})"
)
"""Those of JSON, a pair of surrogates as one, and two more of Python's and JavaScript's texts."""
_SHORT: Final = {
    b"\\b": b"\b",
    b"\\f": b"\f",
    b"\\n": b"\n",
    b"\\r": b"\r",
    b"\\t": b"\t",
    **{b"\\" + sign: sign for sign in (b'"', b"'", b"\\", b"/")},
}
_ASIDE: Final = b"\xff"
"""In place of an escaped backslash, while others are undone. No UTF-8 has this byte."""
_END_OF_ESCAPE: Final = re.compile(rb"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[bfnrt])$")
_ESCAPE_BYTES: Final = 6
"""The longest match of `_END_OF_ESCAPE`."""


def levels(data: bytes) -> Iterator[bytes]:
    """Yield the text with its escapes undone once, twice, and so on while there are any."""
    for _ in range(MAX_LEVELS):
        if b"\\" not in data:
            return
        before = len(data)
        data = _undone_once(data)
        if len(data) == before:  # there was none: an escape is longer than its character
            return
        yield data


def undone(data: bytes) -> bytes:
    """Return the text with the escapes of all levels undone."""
    return [data, *levels(data)][-1]


def find(detectors: Detectors, data: bytes) -> list[Found]:
    """Return the values in a text, with their places in it as it stands; as `Detectors.find`.

    A value that begins with the letter of an escape (`\\nanna@b.de`) begins behind the escape.
    Raises: TooManyError.
    """
    found = detectors.find(data)
    below: list[Found] = []
    steps: list[_Escapes] = []
    outer = data
    for text in levels(data):
        steps.append(_Escapes(outer))
        outer = text
        if detectors.may_match(text):
            below += (_place(one, steps) for one in detectors.find(text))
    if not below:
        return found
    every = [*found, *below]
    last: dict[tuple[str, int], int] = {}
    for one in every:
        last[one.kind, one.end] = max(one.start, last.get((one.kind, one.end), 0))
    return detectors.merged(
        [one for one in every if not _is_behind_escape(last[one.kind, one.end], one.start, data)]
    )


def _undone_once(data: bytes) -> bytes:
    """Return what `_ESCAPE.sub(_character, data)` gives, in a fifth of the time: mostly there are
    short escapes only."""
    if _ASIDE in data:
        return _ESCAPE.sub(_character, data)
    data = data.replace(b"\\\\", _ASIDE)
    for escape, character in _SHORT.items():
        data = data.replace(escape, character)
    if b"\\" in data:
        data = _ESCAPE.sub(_character, data)
    return data.replace(_ASIDE, b"\\")


def _character(match: re.Match[bytes]) -> bytes:
    escape = match[0]
    if (short := _SHORT.get(escape)) is not None:
        return short
    code = int(escape[2:6], 16)
    if len(escape) == 12:  # two escapes, a pair of surrogates
        code = 0x10000 + ((code - 0xD800) << 10) + int(escape[8:], 16) - 0xDC00
    return chr(code).encode("utf-8", "surrogatepass")


class _Escapes:
    """Where the escapes of a text are, and where their characters are once they are undone."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._all: list[_Escape] | None = None  # made when a value is found: mostly there is none
        self._starts: list[int] = []

    def start(self, at: int) -> int:
        """Return the place of a byte before the escapes were undone; of an escape its first."""
        one = self._at(at)
        return one.start if at < one.undone_end else one.end + at - one.undone_end

    def end(self, at: int) -> int:
        """Return the place of an end (the byte behind it) before the escapes were undone."""
        one = self._at(at - 1)
        return one.end if at <= one.undone_end else one.end + at - one.undone_end

    def _at(self, at: int) -> _Escape:
        """Return the last escape that begins here or before."""
        if self._all is None:
            self._all = [_Escape(0, 0, 0)]
            self._starts = [0]
            shorter = 0
            for match in _ESCAPE.finditer(self._data):
                start, end = match.span()
                self._starts.append(start - shorter)
                shorter += end - start - len(_character(match))
                self._all.append(_Escape(start, end, end - shorter))
        return self._all[bisect_right(self._starts, at) - 1]


class _Escape(NamedTuple):
    start: int
    end: int
    undone_end: int
    """Where its character ends once the escapes are undone."""


def _place(found: Found, steps: Sequence[_Escapes]) -> Found:
    start, end = found.start, found.end
    for one in reversed(steps):
        start, end = one.start(start), one.end(end)
    return Found(found.kind, start, end)


def _is_behind_escape(start: int, old: int, data: bytes) -> bool:
    """True when a value begins at `start`, and at `old` the letters of an escape before it."""
    if start <= old:
        return False
    before = max(0, start - _ESCAPE_BYTES)
    escape = _END_OF_ESCAPE.search(data[before:start])
    return escape is not None and before + escape.start() < old
