"""Keep request bodies in little more memory than their length, and all of them within a limit.

No IO; for one thread.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

from sidecar.metrics.hot import Gauge

FREE_BYTES: Final = 64 * 1024
"""A body up to this length is always accepted and never counted: `proxy.max_connections` bounds
their number, and stalled uploads then keep no ordinary request out."""


class BodyPieces:
    """The received part of one body, joined as it comes. A list would keep an object of 40 bytes
    for each piece, and a client may send pieces of one byte."""

    __slots__ = ("_first", "_rest")

    def __init__(self) -> None:
        self._first = b""
        self._rest: BytesIO | None = None

    def add(self, data: bytes) -> None:
        rest = self._rest
        if rest is not None:
            rest.write(data)
        elif not self._first:
            self._first = data
        else:
            self._rest = rest = BytesIO()
            rest.write(self._first)
            rest.write(data)
            self._first = b""

    def take(self) -> bytes:
        """Return all that came, and hold nothing."""
        rest, self._rest = self._rest, None
        if rest is not None:
            return rest.getvalue()  # the very memory, not a copy
        first, self._first = self._first, b""
        return first


class BodyBudget:
    """Counts the bytes that one worker holds for long bodies, incoming or in flight."""

    __slots__ = ("_gauge", "held", "limit")

    def __init__(self, limit: int, gauge: Gauge) -> None:
        self.limit = limit
        self.held = 0
        self._gauge = gauge

    def fits(self, more: int, own: int) -> bool:
        """True if there is room for `more` bytes. own: the bytes that this body holds already. One
        body alone always fits: `proxy.max_body_bytes` bounds it."""
        return self.held + more <= self.limit or self.held == own

    def take(self, more: int, own: int) -> bool:
        """Reserve `more` bytes. Returns: False when they do not fit."""
        if not self.fits(more, own):
            return False
        self.held += more
        self._gauge.set(self.held)
        return True

    def give_back(self, count: int) -> None:
        self.held -= count
        self._gauge.set(self.held)
