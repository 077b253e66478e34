"""Read a long body of known length to where it stays.

A body that comes in reads is copied twice before it is one: out of the event loop's buffer, and
together. A prompt of a megabyte is read into its place instead, which is a BytesIO's memory: its
`getvalue` hands over that very memory as bytes.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Final, Protocol

LONG_BYTES: Final = 64 * 1024
"""What is still to come of a body that is read to its place."""
AHEAD: Final = 2
"""So many times what came is held ready: a length that is only announced holds no memory."""


class LongBody:
    """The bytes of one body, of which some are here. No IO."""

    def __init__(self, length: int, came: bytes) -> None:
        """length: of all of it. came: its beginning, not empty and not whole."""
        self._length = length
        self._held = BytesIO()
        self._held.write(came)
        self.came = self._held.tell()
        self._end = self.came
        self._room = memoryview(b"")

    @property
    def whole(self) -> bool:
        return self.came == self._length

    @property
    def needs_bytes(self) -> int:
        """What it holds when `room` is asked for next."""
        if self.came < self._end:
            return self._end
        return min(self._length, AHEAD * max(self.came, LONG_BYTES))

    def room(self) -> memoryview:
        """Where the next bytes go; not empty while the body is not whole."""
        if self.came == self._end:
            self._grow()
        return self._room[self.came :]

    def took(self, count: int) -> None:
        """So many bytes were written into `room`."""
        self.came += count

    def take(self) -> bytes:
        """What came of the body, whole or not. Nobody may hold a `room` any more."""
        self._room.release()
        # A transport may keep what read it for as long as it is open (uvloop's does).
        held, self._held = self._held, BytesIO()
        return held.getvalue()

    def _grow(self) -> None:
        self._room.release()
        self._end = self.needs_bytes
        self._held.seek(self._end - 1)
        self._held.write(b"\0")
        self._room = self._held.getbuffer()


class LongBodyOwner(Protocol):
    """The client's connection, whose body this is."""

    def long_body_came(self, body: LongBody) -> None:
        """Some of it. Called from within the read, so `take` is for later."""
        ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...


class LongBodyReader(asyncio.BufferedProtocol):
    """Stands in for the client's connection until one body is whole."""

    def __init__(self, owner: LongBodyOwner, body: LongBody) -> None:
        self._owner = owner
        self._body = body

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._body.took(nbytes)
        self._owner.long_body_came(self._body)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.connection_lost(error)
