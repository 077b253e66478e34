"""The in-memory `Sender`: it keeps what it is given, and fails as it is told."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.forwarding.sender import Failure, Record


class MemorySender:
    """Limits are those of a topic: a record over `max_bytes` is refused for good."""

    def __init__(self, max_bytes: int = 1_000_000_000) -> None:
        self.max_bytes = max_bytes
        self.kept: list[Record] = []
        self.announced: list[tuple[str, int]] = []
        self.failing: set[str] = set()
        """Exchanges that are not acknowledged."""
        self.closed = 0

    def send(self, records: Sequence[Record]) -> Sequence[Failure | None]:
        return [self._send(record) for record in records]

    def _send(self, record: Record) -> Failure | None:
        if len(record.value) > self.max_bytes:
            return Failure(reason="too_large", message="MessageSizeTooLargeError", final=True)
        if record.exchange_id in self.failing:
            return Failure(reason="timeout", message="no answer", final=False)
        self.kept.append(record)
        return None

    def announce(self, exchange_id: str, reason: str, size: int) -> None:
        self.announced.append((exchange_id, size))

    def close(self) -> None:
        self.closed += 1
