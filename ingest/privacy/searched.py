"""Remember which parts of requests hold nothing that is searched for. Pure.

Each request of a conversation repeats the messages before it, and the tools, in the same bytes. A
part in which no pattern matches is not read again.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

MAX_BYTES: Final = 8 * 2**20
"""Memory of what is remembered: some 15,000 messages of ordinary size."""
ENTRY_BYTES: Final = 200
"""Memory of an entry besides its key."""
DIGESTED: Final = 512
"""Bytes of a part from which its digest stands for it."""


class Searched:
    """Parts of bodies by their bytes; the least recently used are dropped first. For one thread,
    and for one set of detectors."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._empty: dict[bytes, None] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._empty)

    def is_empty(self, written: bytes) -> bool:
        """True when no pattern matches in this part. False: it is to be searched."""
        key = _key(written)
        if key not in self._empty:
            return False
        self._empty[key] = self._empty.pop(key)  # now the most recently used
        return True

    def put(self, written: bytes) -> None:
        """Remember that no pattern matches in this part."""
        key = _key(written)
        if key in self._empty:
            return
        self._empty[key] = None
        self._bytes += ENTRY_BYTES + len(key)
        while self._bytes > self._max_bytes:
            oldest = next(iter(self._empty))
            del self._empty[oldest]
            self._bytes -= ENTRY_BYTES + len(oldest)


def _key(written: bytes) -> bytes:
    return written if len(written) < DIGESTED else blake2b(written, digest_size=32).digest()
