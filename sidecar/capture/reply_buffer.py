"""Keep the chunks of a reply while it is relayed, within memory limits. Never blocks."""

from __future__ import annotations


class HeldBytes:
    """Bytes held in memory for the capture. Each number is written by one thread, so that the
    relay needs no lock."""

    def __init__(self, *, max_reply: int, max_pending: int) -> None:
        """max_reply: limit of one reply, in bytes. max_pending: limit of all replies that are being
        relayed or are queued, in bytes."""
        self._max_reply = max_reply
        self._max_pending = max_pending
        self.buffered = 0
        """Bytes of replies that are still being relayed. Written by the relay's thread."""
        self.offered = 0
        """Bytes queued since the start. Written by the relay's thread."""
        self.done = 0
        """Bytes written or dropped after queueing, since the start. Written by the recorder's
        thread."""

    @property
    def now(self) -> int:
        return self.buffered + self.offered - self.done

    def has_room(self, more: int) -> bool:
        return self.now + more <= self._max_pending

    def refuse(self, reply_bytes: int, more: int) -> str | None:
        """Reserve `more` bytes for a reply. Returns: why that is refused; None when it is
        granted."""
        if reply_bytes > self._max_reply:
            return "reply_too_long"
        if self.buffered + self.offered - self.done + more > self._max_pending:
            return "memory_full"
        self.buffered += more
        return None


class ReplyBuffer:
    """The chunks of one reply."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._chunks: list[bytes] = []
        self.size = 0
        """Bytes held. `take` sets it to 0, so read it first."""
        self.lost_reason: str | None = None

    def add(self, chunk: bytes) -> None:
        if self.lost_reason is not None:
            return
        length = len(chunk)
        reason = self._held.refuse(self.size + length, length)
        if reason is not None:
            self.clear()
            self.lost_reason = reason
            return
        self.size += length
        self._chunks.append(chunk)

    def clear(self) -> None:
        """Drop all chunks: the reply is too long, or another reply replaces it."""
        self._held.buffered -= self.size
        self.size = 0
        self._chunks = []

    def take(self) -> tuple[bytes, ...]:
        chunks = tuple(self._chunks)
        self.clear()
        return chunks
