"""Decoded exchanges in memory, because others are stored as their difference from them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

MAX_BYTES = 64 * 2**20
"""Some 5,000 exchanges of ordinary length."""
_ENTRY_BYTES = 400
"""What an entry takes besides its bytes."""
MAX_OPENINGS = 4096
MAX_OPENING_USES = 64
"""Conversations whose beginning is stored as the difference from that of one other: so many rows at
most must be written anew before that one is deleted."""


@dataclass(frozen=True, slots=True)
class Content:
    """The part of an exchange that the next one repeats."""

    request: bytes
    prompt_ids: bytes
    """Packed."""
    replies: bytes | None
    """The messages of all choices; None: not read."""
    reply_ids: bytes | None
    """The token ids of all choices, packed; None: not read."""
    links: int = 0
    """Number of bases below it."""
    chain_bytes: int = 0
    """Decoded bytes of these bases."""

    @property
    def size(self) -> int:
        """Decoded bytes."""
        replies, reply_ids = self.replies or b"", self.reply_ids or b""
        return len(self.request) + len(self.prompt_ids) + len(replies) + len(reply_ids)

    @property
    def request_base(self) -> bytes:
        """What the request of the next exchange repeats."""
        return self.request + (self.replies or b"")

    @property
    def prompt_base(self) -> bytes:
        """What the prompt of the next exchange repeats."""
        return self.prompt_ids + (self.reply_ids or b"")


class ContentCache:
    """Contents by exchange id; the least recently used are dropped first. Thread-safe.

    An exchange may be here that is no longer in the store, or never was, because its transaction
    failed. Ids are never used twice, so its content is right all the same; who stores a difference
    from it asks the store first whether it is there.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._contents: dict[str, Content] = {}
        self._openings: dict[bytes, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def get(self, exchange_id: str) -> Content | None:
        """Return a content, with its replies; None when it is not here."""
        with self._lock:
            content = self._contents.pop(exchange_id, None)
            if content is not None:
                self._contents[exchange_id] = content  # now the most recently used
            return content

    def put(self, exchange_id: str, content: Content) -> None:
        """Keep a content. One without its replies is no base, and one over the limit too large."""
        size = content.size + _ENTRY_BYTES
        if content.replies is None or content.reply_ids is None or size > self._max_bytes:
            return
        with self._lock:
            known = self._contents.pop(exchange_id, None)
            self._bytes += size - (0 if known is None else known.size + _ENTRY_BYTES)
            self._contents[exchange_id] = content
            while self._bytes > self._max_bytes:
                oldest = self._contents.pop(next(iter(self._contents)))
                self._bytes -= oldest.size + _ENTRY_BYTES

    def drop(self, exchange_id: str) -> None:
        """Forget a content that was deleted."""
        with self._lock:
            known = self._contents.pop(exchange_id, None)
            if known is not None:
                self._bytes -= known.size + _ENTRY_BYTES

    def opening(self, mark: bytes) -> str | None:
        """Return the exchange that the next opening of this mark may repeat; count the use."""
        with self._lock:
            exchange_id, uses = self._openings.pop(mark, ("", MAX_OPENING_USES))
            if uses >= MAX_OPENING_USES:
                return None
            self._openings[mark] = (exchange_id, uses + 1)
            return exchange_id

    def set_opening(self, mark: bytes, exchange_id: str) -> None:
        """Let following conversations of this mark repeat this exchange."""
        with self._lock:
            self._openings.pop(mark, None)
            self._openings[mark] = (exchange_id, 0)
            if len(self._openings) > MAX_OPENINGS:
                del self._openings[next(iter(self._openings))]
