"""Decode many events of a stream at once. Pure.

Nearly all of a stream are events that are alike to the byte but for their choice, and each came as
one chunk. `Frame` cuts those bytes off, and many choices are decoded in one call: half the time
that one event after the other takes. What is not like this is for `reply_choices.py` to read event
by event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.replies.choice_fields import REPLY, ChoiceFields, ReplyFields
from sidecar.replies.parts import Document

RUN_BYTES = 32_768
"""Of events that are decoded in one call, which keeps the interpreter from the relay's thread: 100
events with log-probabilities, 50 us. Twice as many bytes are left to be decoded one by one."""
_ENDS = 64
"""Events at either end of a stream among which the usual ones may begin and end."""
_BEFORE_CHOICE = b'"choices":[{'
_BEHIND_CHOICE = b"}]}\n\n"
_LINE_END = 0x0A


class Frame(NamedTuple):
    """What the usual events of one stream have before and behind what their one choice says."""

    head: bytes
    model: str | None

    def holds(self, chunk: bytes) -> bool:
        return chunk.startswith(self.head) and chunk.endswith(_BEHIND_CHOICE)

    def between(self, chunks: Sequence[bytes]) -> tuple[int, int]:
        """Where the usual events begin and end; the same when they are not nearly all."""
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
        """The choices of usual events, one on each line; None when one of them is not usual, or
        when they are too long. All are checked at once: each lost as much as a usual one does."""
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
    """The frame that the events behind this one will probably have; None when it says more than
    the model."""
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
    """Decode objects, each on one line of its own; None when that many cannot be read.

    It takes exactly what one by one is taken: JSON allows `}`, a line's end and `{` in this order
    nowhere inside a value, so each line is whole values; and as many values as lines are one each.
    """
    try:
        found = decoder.decode_lines(lines)
    except UNREADABLE_JSON:
        return None
    return found if len(found) == count else None
