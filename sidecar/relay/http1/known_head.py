"""Recognise a head that was parsed before, so that it need not be parsed again. Pure.

An agent's SDK writes the same head for every request of a connection, and vLLM for every reply,
except for the length of the body. llhttp and the relay's own rules judge a head once; the same
bytes mean the same again, whatever the digits of Content-Length. Any other head goes to the parser:
this module compares bytes and interprets none.
"""

from __future__ import annotations

import re
from typing import Final

MAX_HEAD_BYTES: Final = 8192
"""Longest head that is cached; each open connection caches one."""
MAX_DIGITS: Final = 15
ZERO: Final = 48
"""ASCII code of the digit 0."""
GIVE_UP_AFTER: Final = 8
"""After this many heads in a row that differ from the one before, a connection caches no more."""
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n")
HEAD_END = b"\r\n\r\n"


class KnownHead:
    """A head without the digits of its Content-Length."""

    __slots__ = ("_after", "_before", "length")

    def __init__(self, before: bytes, after: bytes) -> None:
        """before: up to the digits. after: from behind them to the blank line, included."""
        self._before = before
        self._after = after
        self.length = 0
        """Length of the body, from the head that was matched last."""

    def match(self, data: bytes) -> int:
        """Return where the body begins in `data`, and set `length`; -1 when `data` does not begin
        with this head."""
        before = self._before
        if not data.startswith(before):
            return -1
        # Digit by digit: compiled, this is a tenth of what slicing and int() cost.
        at, length = len(before), 0
        stop = min(len(data), at + MAX_DIGITS)
        start = at
        while at < stop:
            digit = data[at] - ZERO
            if digit < 0 or digit > 9:
                break
            length = length * 10 + digit
            at += 1
        end = at + len(self._after)
        if at == start or data[at:end] != self._after:
            return -1
        self.length = length
        return end


class HeadMemory:
    """The last head of one connection."""

    __slots__ = ("_unlike", "head")

    def __init__(self) -> None:
        self.head: KnownHead | None = None
        self._unlike = 0

    def match(self, data: bytes) -> int:
        """As `KnownHead.match`; it sets `head.length`."""
        head = self.head
        if head is None:
            return -1
        at = head.match(data)
        if at > 0:
            self._unlike = 0
        return at

    def learn(self, first: bytes, body_length: int) -> bool:
        """Cache a head that was accepted.

        first: the first read of its message, from the message's first byte.
        body_length: length of the body that followed, which the head must have announced.
        Returns: False when it is not cached; then no older head is either.
        """
        self.head = None
        if self._unlike >= GIVE_UP_AFTER:
            return False
        self._unlike += 1
        end = first.find(HEAD_END, 0, MAX_HEAD_BYTES) + len(HEAD_END)
        if end < len(HEAD_END):
            return False
        found = _LENGTH.search(first, 0, end)
        if found is None or int(found[1]) != body_length:
            return False
        start, stop = found.span(1)
        self.head = KnownHead(first[:start], first[stop:end])
        return True
