"""What the parts of the relay need of each other, where importing the other would make a circle."""

from __future__ import annotations

from typing import Protocol


class ClientSide(Protocol):
    """A client's connection, as the request in flight uses it."""

    @property
    def address(self) -> str:
        """The client's IP address; "" where the connection has none."""

    def write(self, data: bytes) -> None:
        """Send bytes to the client, or keep them until it reads."""

    def reply_done(self, *, keep_alive: bool, at: float) -> None:
        """The reply was written whole. at: now, by `time.perf_counter()`."""

    def reply_broken(self) -> None:
        """The reply cannot be completed: the connection ends."""
