"""Split a stream of server-sent events at its blank lines, wherever the network cut it. Pure.

Lines end in LF or CR LF. A lone CR, which the standard also allows, is not taken for a line's end:
no server of this kind writes it, and knowing it would mean holding back every trailing CR.
"""

from __future__ import annotations

import re
from typing import Final

_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_LOOK_BACK: Final = 2
"""Bytes of a blank line that may have come before the rest of it."""


class EventSplitter:
    """Takes pieces and returns whole events, blank line included. No byte is changed or lost: all
    events and `rest()` joined are the bytes that were fed."""

    def __init__(self) -> None:
        self.pending = b""
        """The event that has not ended yet."""

    @property
    def pending_bytes(self) -> int:
        """Length of the event that has not ended yet."""
        return len(self.pending)

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes, and return the events that they complete, in order."""
        searched = max(0, len(self.pending) - _LOOK_BACK)
        buffer = self.pending + data if self.pending else data
        events: list[bytes] = []
        start = 0
        for match in _BLANK_LINE.finditer(buffer, searched):
            events.append(buffer[start : match.end()])
            start = match.end()
        self.pending = buffer[start:]
        return events

    def rest(self) -> bytes:
        """Return what came after the last blank line, and empty the splitter."""
        rest, self.pending = self.pending, b""
        return rest


def is_one_event(data: bytes) -> bool:
    """True if this is exactly one event as vLLM writes it, which is the usual read of a stream."""
    return data[-2:] == b"\n\n" and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data
