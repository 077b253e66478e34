"""The bytes that came on a connection and are not parsed yet. No IO."""

from __future__ import annotations

from collections import deque
from typing import Final

SMALL_BYTES: Final = 4096
"""A piece under this size is joined with what comes next: a client may send a byte at a time, and
each piece is an object."""


class EarlyBytes:
    """`add` what came, `take` it in order."""

    __slots__ = ("_at", "pieces", "size")

    def __init__(self) -> None:
        self.pieces: deque[bytes] = deque()
        self._at = 0
        """So many bytes of the first piece are taken."""
        self.size = 0
        """Bytes that are not taken."""

    def add(self, data: bytes) -> None:
        pieces = self.pieces
        if pieces and len(pieces[-1]) < SMALL_BYTES:
            pieces[-1] += data
        else:
            pieces.append(data)
        self.size += len(data)

    def take(self, most: int) -> bytes:
        """The next bytes: at most so many, and not all when they are in several pieces."""
        first, at = self.pieces[0], self._at
        end = at + most
        data = first[at:end] if at or end < len(first) else first
        if end < len(first):
            self._at = end
        else:
            self._at = 0
            self.pieces.popleft()
        self.size -= len(data)
        return data

    def clear(self) -> None:
        self.pieces.clear()
        self._at = self.size = 0
