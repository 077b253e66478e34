"""A connection's way out: by the loop's transport, or at once, for what ends a turn of the loop.

uvloop keeps what is written and sends it when all of a turn is done, which takes a microsecond more
for an event of a stream, or a request, than to send it here. Only for what ends a turn's work:
behind a call into the kernel the relay's own code finds its caches cold, and a whole reply that was
sent so, before its accounts were made, took more CPU than it saved (`docs/log.md`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Final

NO_SOCKET: Final = -1
_write: Final = os.write


class Outlet:
    """Writes to one connection, in order; made and dropped with its transport."""

    __slots__ = ("_socket", "_transport", "_waits")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._socket: int = _socket_of(transport)
        self._waits = False
        """The transport may have something that is not sent yet."""

    def write(self, data: bytes) -> None:
        """Send when all of this turn is done."""
        self._waits = True
        self._transport.write(data)

    def writelines(self, pieces: Sequence[bytes | memoryview]) -> None:
        """`write` several, in one call into the kernel."""
        self._waits = True
        self._transport.writelines(pieces)

    def write_now(self, data: bytes) -> None:
        """Send. What the socket does not take now waits in the transport, with its limits; and of a
        connection that is gone the transport tells."""
        if self._waits and self._transport.get_write_buffer_size() == 0:
            self._waits = False
        if self._waits or self._socket == NO_SOCKET:
            self.write(data)
            return
        try:
            sent: int = _write(self._socket, data)
        except OSError:  # full, or gone: the transport finds the same, and acts on it
            sent = 0
        if sent < len(data):
            self.write(data[sent:])

    def end(self) -> None:
        """Say that no more comes, behind all that was written; the client may go on sending."""
        self._socket = NO_SOCKET
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def close(self) -> None:
        """Close when all that was written is sent. What is written after this is dropped."""
        self._socket = NO_SOCKET
        self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._socket = NO_SOCKET
        self._transport.abort()


def _socket_of(transport: asyncio.Transport) -> int:
    """What may be written to past the transport, for as long as that is open; `NO_SOCKET` when
    there is none, or when what is written must be encrypted."""
    sock = transport.get_extra_info("socket")
    if sock is None or transport.get_extra_info("sslcontext") is not None:
        return NO_SOCKET
    descriptor: int = sock.fileno()
    return descriptor
