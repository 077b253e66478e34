"""Pipelined bytes of a connection that wait to be parsed. No IO."""

from __future__ import annotations

from collections import deque
from typing import Final

SMALL_BYTES: Final = 4096
"""A piece under this size is joined with the next one: a client may send a byte at a time, and each
piece is an object."""


class EarlyBytes:
    """A queue of bytes: `add` reads, `take` them in order."""

    __slots__ = ("_at", "pieces", "size")

    def __init__(self) -> None:
        self.pieces: deque[bytes] = deque()
        self._at = 0
        """Bytes of the first piece already taken."""
        self.size = 0
        """Bytes not taken yet."""

    def add(self, data: bytes) -> None:
        pieces = self.pieces
        if pieces and len(pieces[-1]) < SMALL_BYTES:
            pieces[-1] += data
        else:
            pieces.append(data)
        self.size += len(data)

    def take(self, most: int) -> bytes:
        """Take the next bytes: at most `most`, and none beyond the first piece."""
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
