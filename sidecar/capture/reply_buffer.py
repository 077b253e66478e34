"""Keep a reply by reference while it passes, within bounds. The relay's thread; never blocks."""

from __future__ import annotations


class HeldBytes:
    """What is held in memory for the capture. Each number has one writing thread, so that the
    relay takes no lock."""

    __slots__ = ("_max_pending", "_max_reply", "buffered", "done", "offered")

    def __init__(self, *, max_reply: int, max_pending: int) -> None:
        """max_reply: bytes of one reply. max_pending: of all replies that are passing or wait."""
        self._max_reply = max_reply
        self._max_pending = max_pending
        self.buffered = 0
        """Of replies still passing; the relay's."""
        self.offered = 0
        """Ever; the relay's."""
        self.done = 0
        """Ever; the capture's."""

    @property
    def now(self) -> int:
        return self.buffered + self.offered - self.done

    def has_room(self, more: int) -> bool:
        return self.now + more <= self._max_pending

    def refuse(self, reply_bytes: int, more: int) -> str | None:
        """Why `more` bytes of a reply cannot be kept; None when they can, and are counted."""
        if reply_bytes > self._max_reply:
            return "reply_too_long"
        if self.buffered + self.offered - self.done + more > self._max_pending:
            return "memory_full"
        self.buffered += more
        return None


class ReplyBuffer:
    """The chunks of one reply."""

    __slots__ = ("_chunks", "_held", "lost_reason", "size")

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._chunks: list[bytes] = []
        self.size = 0
        """Bytes that it holds; read it before `take`, for `RawCapture.reply_bytes`."""
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
        """Forget everything: the reply is too long, or another one takes its place."""
        self._held.buffered -= self.size
        self.size = 0
        self._chunks = []

    def take(self) -> tuple[bytes, ...]:
        chunks = tuple(self._chunks)
        self.clear()
        return chunks
