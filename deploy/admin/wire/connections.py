"""Connections of the admin listener: each must ask in time and read its replies, and their number
is bounded.

uvicorn times a connection between two requests, but neither one whose request head never ends nor
one whose client does not read. Without a bound such connections take every file that control may
open, and with them the rollback; so nobody needs a token to keep one.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import ClassVar, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""Time for a whole request head, from the connection or from the head's first byte. uvicorn reads
at most 64 KiB of it."""
KEPT: Final = 128 * 1024
"""Bytes of replies that the system keeps for a client (Linux: twice as many). By itself it keeps
megabytes, and takes seconds of work to show that a client reads nothing."""
STUCK_S: Final = 20.0
"""Time in which a client that has a reply to read must read some of it. The system takes bytes
again only when a third of what it keeps has gone: who reads 5 kB a second passes."""
MOST: Final = 200
"""Connections at once: 60 streams, and people and scripts that ask. A process may open 1,024 files
on most systems."""


class AdminConnection(H11Protocol):
    """One connection."""

    most: ClassVar[int] = MOST
    """Connections at once, where fewer files than for `MOST` may be open."""
    _timer: asyncio.TimerHandle | None = None
    _since: float = 0.0
    _writing: asyncio.TimerHandle | None = None
    _stuck_since: float | None = None
    """Since when bytes wait for the client to read; None: none do."""
    _unsent: int = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # any byte that waits calls `pause_writing`
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KEPT)
        self._wait()
        open_ones = cast(list[AdminConnection], list(self.connections))
        open_ones = [one for one in open_ones if not one._is_gone()]
        if len(open_ones) > self.most:
            self._make_room(open_ones)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._asks_nothing():
            self._stop_waiting()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._stuck_since = self.loop.time()
            self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

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

    def _watch_writing(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(STUCK_S, self._has_read)

    def _has_read(self) -> None:
        """Close the connection unless its client has read since; then look again."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_writing()
        else:
            self._drop()

    def _stop_watching(self) -> None:
        self._stuck_since = None
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _is_gone(self) -> bool:
        """One that closes keeps its file until its client has read the rest."""
        return self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    def _drop(self) -> None:
        self._stop_watching()
        if (sock := self.transport.get_extra_info("socket")) is not None:
            # Else the system would keep the unsent bytes for minutes.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _make_room(self, open_ones: list[AdminConnection]) -> None:
        """Close the one that has asked nothing, or read nothing, for longest; this one if all
        others are at work."""
        idle = {one: one._since for one in open_ones if one._asks_nothing()}
        stuck = {one: one._stuck_since for one in open_ones if one._stuck_since is not None}
        since = {one: at for one, at in (idle | stuck).items() if one is not self}
        min(since, key=since.__getitem__, default=self)._drop()
