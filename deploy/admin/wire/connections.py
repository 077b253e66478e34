"""Connections of the admin listener: each must ask in time, and their number is bounded.

uvicorn times a connection between two requests, but not one whose request head never ends. Without
a bound such connections take every file that control may open, and with them the rollback.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""Time for a whole request head, from the connection or from the head's first byte. uvicorn reads
at most 64 KiB of it."""
MOST: Final = 200
"""Connections at once: 60 streams, and people and scripts that ask. A process may open 1,024 files
on most systems."""


class AdminConnection(H11Protocol):
    """One connection."""

    _timer: asyncio.TimerHandle | None = None
    _since: float = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        open_ones = [one for one in self.connections if not one.transport.is_closing()]
        if len(open_ones) > MOST:
            self._make_room(cast(list[AdminConnection], open_ones))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._asks_nothing():
            self._stop_waiting()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _asks_nothing(self) -> bool:
        """Return True until a request head is complete."""
        return self.conn.their_state is h11.IDLE

    def _wait(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._asks_nothing():
            self.transport.abort()

    def _make_room(self, open_ones: list[AdminConnection]) -> None:
        """Close the connection that has asked nothing for longest; this one if all others ask."""
        idle = [one for one in open_ones if one is not self and one._asks_nothing()]
        min(idle, key=lambda one: one._since, default=self).transport.abort()
