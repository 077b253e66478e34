"""Decode many events of a stream at once. Pure.

Most events of a stream are equal byte for byte except for their choice, and each arrived as one
chunk. `Frame` removes the equal bytes, and many choices are decoded in one call, which takes half
the time of decoding each event. `choices.py` reads other events one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.replies.choice_fields import REPLY, ChoiceFields, ReplyFields
from sidecar.replies.parts import Document

RUN_BYTES = 32_768
"""Bytes of events decoded in one call: 100 events with log-probabilities, 50 us, in which the
relay's thread cannot take the interpreter lock. With twice as much, more events at the end of a
stream would be decoded one by one."""
_ENDS = 64
"""At either end of a stream, events that are searched for the first and last typical one."""
_BEFORE_CHOICE = b'"choices":[{'
_BEHIND_CHOICE = b"}]}\n\n"
_LINE_END = 0x0A


class Frame(NamedTuple):
    """The bytes before and after the choice in the typical events of one stream."""

    head: bytes
    model: str | None

    def holds(self, chunk: bytes) -> bool:
        return chunk.startswith(self.head) and chunk.endswith(_BEHIND_CHOICE)

    def between(self, chunks: Sequence[bytes]) -> tuple[int, int]:
        """Return where the typical events begin and end; equal numbers when they are too few."""
        ends = min(_ENDS, len(chunks))
        first, last = 0, len(chunks)
        while not self.holds(chunks[first]):
            first += 1
            if first == ends:
                return last, last
        while last > len(chunks) - ends and not self.holds(chunks[last - 1]):
            last -= 1
        return first, last

    def choices(self, run: Sequence[bytes]) -> bytes | None:
        """Return the choices of typical events, one on each line; None when one event is not
        typical, or they are too long. All are checked at once by their total length."""
        size = sum(map(len, run))
        if size > 2 * RUN_BYTES:
            return None
        head = self.head
        inner = [chunk.removeprefix(head).removesuffix(_BEHIND_CHOICE) for chunk in run]
        joined = b"".join(inner)
        lost = len(run) * (len(head) + len(_BEHIND_CHOICE))
        if size - len(joined) != lost or _LINE_END in joined:
            return None
        return b"{%b}" % b"}\n{".join(inner)


def frame_of(event: bytes) -> Frame | None:
    """Return the frame that the events after this one probably share; None when the event holds
    more than model and choice."""
    head = event[: event.find(_BEFORE_CHOICE) + len(_BEFORE_CHOICE)]
    if not head.startswith(b"data: {") or not head.endswith(_BEFORE_CHOICE) or _LINE_END in head:
        return None
    try:
        said = REPLY.decode(head[5:] + b"}]}")
    except UNREADABLE_JSON:
        return None
    return Frame(head, said.model) if said == ReplyFields(said.model, [ChoiceFields()]) else None


def decode_lines(
    decoder: msgspec.json.Decoder[Document], lines: bytes, count: int
) -> list[Document] | None:
    """Decode objects, one on each line. Returns: None when any of them cannot be read.

    The result equals decoding each line: inside a JSON value, `}`, a line end and `{` never follow
    each other, so each line is whole values; and when there are as many values as lines, each line
    is one.
    """
    try:
        found = decoder.decode_lines(lines)
    except UNREADABLE_JSON:
        return None
    return found if len(found) == count else None
