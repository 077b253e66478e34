"""Turn a reply's body into the bytes for the client, in one of three ways. Pure.

passed: unchanged. events: each server-sent event is edited. held: the whole body is edited when it
is complete, because the edit changes its length.
`StreamOpening` holds the beginning of a stream in front of each of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Final, Literal

from msgspec import json

from sidecar.errors import UNREADABLE_JSON
from sidecar.relay.http1.heads import EVENT_STREAM
from sidecar.relay.http1.sse import EventSplitter, is_one_event
from sidecar.relay.payload.reply_edit import MAX_HELD_BYTES, Strip, strip_event, strip_reply
from sidecar.relay.payload.template import EventShape, learn_shape

LESSONS: Final = 16
"""Events from which a template is tried to be learned; a stream of another kind has none."""
EVENT_END: Final = (b"\n\n", b"\r\n\r\n")
ERROR_BYTES: Final = 1024
"""Where a reply, or an event, is looked at for an error and for its role: at its beginning. The
model's name stands before a role; prompts of any length stand behind."""

Length = Literal["kept", "whole", "unknown"]
"""kept: as vLLM's head says; whole: sent in one piece; unknown: not known before the end."""


class ReplyBody(ABC):
    """Takes the reply's bytes and returns those that may go to the client now."""

    __slots__ = ("holds", "length")

    def __init__(self, *, holds: bool, length: Length) -> None:
        self.holds = holds
        """True while nothing may be sent, not even the head: its length is not known."""
        self.length = length

    @abstractmethod
    def feed(self, data: bytes) -> bytes: ...

    @abstractmethod
    def end(self) -> bytes: ...

    @abstractmethod
    def rest_dropped(self, last: bytes) -> bool:
        """The reply breaks off here: drop an incomplete event. Returns: True if the client has only
        whole events, so that one more may follow.

        last: what was fed last."""


class PassedBody(ReplyBody):
    """Passes every byte on at once, unchanged."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(holds=False, length="kept")

    def feed(self, data: bytes) -> bytes:
        return data

    def end(self) -> bytes:
        return b""

    def rest_dropped(self, last: bytes) -> bool:
        return last.endswith(EVENT_END)


class EventBody(ReplyBody):
    """Passes events on as they complete, without what the client did not ask for."""

    __slots__ = ("_lessons", "_passing", "_shape", "_splitter", "_strip")

    def __init__(self, strip: Strip) -> None:
        super().__init__(holds=False, length="unknown")
        self._strip = strip
        self._splitter = EventSplitter()
        self._passing = False
        self._shape: EventShape | None = None
        self._lessons = LESSONS if strip.everything and not strip.usage else 0

    def feed(self, data: bytes) -> bytes:
        if self._passing:
            return data
        splitter = self._splitter
        if not splitter.pending:
            if self._shape is not None:
                stripped = self._shape.strip(data)
                if stripped is not None:
                    return stripped
            if is_one_event(data):
                stripped = strip_event(data, self._strip)
                if self._shape is None and self._lessons:
                    self._lessons -= 1
                    self._shape = learn_shape(data, stripped)
                return stripped
        events = splitter.feed(data)
        out = b"".join([strip_event(event, self._strip) for event in events])
        if splitter.pending_bytes > MAX_HELD_BYTES:
            self._passing = True
            return out + splitter.rest()
        return out

    def end(self) -> bytes:
        return self._splitter.rest()

    def rest_dropped(self, last: bytes) -> bool:
        self._splitter.rest()
        return not self._passing


class HeldBody(ReplyBody):
    """Passes nothing on until the end, then the whole reply, edited."""

    __slots__ = ("_pieces", "_size", "_strip")

    def __init__(self, strip: Strip) -> None:
        super().__init__(holds=True, length="whole")
        self._strip = strip
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        if not self.holds:
            return data
        self._pieces.append(data)
        self._size += len(data)
        if self._size > MAX_HELD_BYTES:
            self.holds, self.length = False, "kept"
            return self._take()
        return b""

    def end(self) -> bytes:
        whole = self._take()
        return whole if self._strip.nothing else strip_reply(whole, self._strip)

    def rest_dropped(self, last: bytes) -> bool:
        return False

    def _take(self) -> bytes:
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole


class StreamOpening(ReplyBody):
    """Holds a stream until an event says more than the role: until then an engine may still fail.

    vLLM 0.32 sends the role before it looks at the first token's log-probabilities, and fails then.
    """

    __slots__ = ("_held", "_splitter", "failed", "inner")

    def __init__(self, inner: ReplyBody) -> None:
        """inner: gets the stream when nothing is held any more."""
        super().__init__(holds=True, length=inner.length)
        self.inner = inner
        self.failed = False
        """The stream begins with an error."""
        self._splitter = EventSplitter()
        self._held: list[bytes] = []

    @property
    def waits(self) -> bool:
        """Whole events are held, none of which says more than the role."""
        return self.holds and bool(self._held) and not self.failed

    def feed(self, data: bytes) -> bytes:
        if not self.holds:
            return self.inner.feed(data)
        events = self._splitter.feed(data)
        self._held += events
        for event in () if self.failed else events:
            if is_error_event(event):
                self.failed = True
                break
            if not _says_little(event):
                return self.let_go()
        if self._splitter.pending_bytes > MAX_HELD_BYTES:
            return self.let_go()
        return b""

    def let_go(self) -> bytes:
        """Return what was held, as it goes to the client."""
        self.holds = False
        held = b"".join((*self._held, self._splitter.rest()))
        self._held.clear()
        return self.inner.feed(held)

    def end(self) -> bytes:
        held = self.let_go() if self.holds else b""
        return held + self.inner.end()

    def rest_dropped(self, last: bytes) -> bool:
        return self.inner.rest_dropped(last)


def is_error(body: bytes) -> bool:
    """True if a JSON body is an error in a form of vLLM or of a gateway. Errors begin with it."""
    if body.find(_ERROR, 0, ERROR_BYTES) < 0:
        return False
    try:
        found = json.decode(body)
    except UNREADABLE_JSON:
        return False
    if not isinstance(found, dict) or "choices" in found:
        return False
    return bool(found.get("error")) or "error" in (found.get("object"), found.get("type"))


def is_error_event(event: bytes) -> bool:
    """True if an event, with its blank line, is an error."""
    if event.find(b"error", 0, ERROR_BYTES) < 0:
        return False
    lines = event.splitlines()
    if b"event: error" in lines or b"event:error" in lines:
        return True
    return is_error(b"\n".join([line[5:] for line in lines if line.startswith(b"data:")]))


def _says_little(event: bytes) -> bool:
    """True for a comment, and for an event with a role and no answer."""
    return event.find(b"data:") < 0 or _ROLE_ALONE.search(event, 0, ERROR_BYTES) is not None


_ERROR: Final = b'error"'
_NOTHING: Final = rb'\s*"(?:role":\s*"\w*"|\w+":\s*(?:""|null|\[\]))\s*'
_ROLE_ALONE: Final = re.compile(rb'"delta":\s*\{' + _NOTHING + b"(?:," + _NOTHING + rb")*\}")
PASSED: Final[ReplyBody] = PassedBody()
"""It has no state, so one object serves all replies."""


def reply_body(*, status: int, content_type: bytes, encoded: bool, strip: Strip) -> ReplyBody:
    """Choose one of the three ways. content_type: lower case. encoded: the reply is compressed and
    cannot be edited."""
    if strip.nothing or status != 200 or encoded:
        return PASSED
    if content_type.startswith(EVENT_STREAM):
        return EventBody(strip)
    if content_type.startswith(b"application/json"):
        return HeldBody(strip)
    return PASSED
