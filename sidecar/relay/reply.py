"""Turn a reply's body into the bytes for the client, in one of three ways. Pure.

passed: unchanged. events: each server-sent event is edited. held: the whole body is edited when it
is complete, because the edit changes its length.
`StreamOpening` holds the beginning of a stream in front of each of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Final, Literal, Protocol

from msgspec import json

from sidecar.errors import UNREADABLE_JSON
from sidecar.relay.context import ClientRequest
from sidecar.relay.heads import EVENT_STREAM, reply_head, reply_lines
from sidecar.relay.reply_edit import MAX_HELD_BYTES, Strip, renamed, strip_event, strip_reply
from sidecar.relay.reply_parser import NO_BODY_STATUSES, EventSplitter, ReplyHead, is_one_event
from sidecar.relay.template import EventShape, learn_shape

LESSONS: Final = 16
"""Events from which a template is tried to be learned; a stream of another kind has none."""
EVENT_END: Final = (b"\n\n", b"\r\n\r\n")
ERROR_BYTES: Final = 1024
"""Where a reply, or an event, is looked at for an error and for its role: at its beginning. The
model's name stands before a role; prompts of any length stand behind."""

Names = tuple[bytes, bytes]
"""The `model` that vLLM writes and the one that the client reads, both as JSON."""
Length = Literal["kept", "whole", "unknown"]
"""kept: as vLLM's head says; whole: sent in one piece; unknown: not known before the end."""


class ReplyBody(ABC):
    """Takes the reply's bytes and returns those that may go to the client now."""

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
        whole events, so that one more may follow. last: what was fed last."""


class PassedBody(ReplyBody):
    """Passes every byte on at once, unchanged."""

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

    def __init__(self, strip: Strip, names: Names | None = None) -> None:
        super().__init__(holds=False, length="unknown")
        self._strip = strip
        self._names = names
        self._splitter = EventSplitter()
        self._passing = False
        self._shape: EventShape | None = None
        self._lessons = LESSONS if strip.everything and not strip.usage else 0

    def feed(self, data: bytes) -> bytes:
        if self._passing:
            return data
        events = self._whole_events(data)
        return events if self._names is None else renamed(events, self._names)

    def _whole_events(self, data: bytes) -> bytes:
        splitter, strip = self._splitter, self._strip
        if strip.nothing:
            if not splitter.pending and is_one_event(data):
                return data
            return b"".join(splitter.feed(data))
        if not splitter.pending:
            if self._shape is not None:
                stripped = self._shape.strip(data)
                if stripped is not None:
                    return stripped
            if is_one_event(data):
                stripped = strip_event(data, strip)
                if self._shape is None and self._lessons:
                    self._lessons -= 1
                    self._shape = learn_shape(data, stripped)
                return stripped
        events = splitter.feed(data)
        out = b"".join([strip_event(event, strip) for event in events])
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

    def __init__(self, strip: Strip, names: Names | None = None) -> None:
        super().__init__(holds=True, length="whole")
        self._strip = strip
        self._names = names
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
        if not self._strip.nothing:
            whole = strip_reply(whole, self._strip)
        return whole if self._names is None else renamed(whole, self._names)

    def rest_dropped(self, last: bytes) -> bool:
        return False

    def _take(self) -> bytes:
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole


class StreamOpening(ReplyBody):
    """Holds a stream until an event says something of the answer: vLLM 0.32 sends the role before
    it looks at the first token's log-probabilities, and fails then."""

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
        """Whole events are held, none of which says something of the answer."""
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
        if not self.holds:
            return self.inner.end()
        # The last event may lack its blank line, and lines may end in CR alone.
        rest = self._splitter.pending.replace(b"\r", b"\n") + b"\n\n"
        for event in EventSplitter().feed(rest):
            self.failed = self.failed or is_error_event(event)
        return self.let_go() + self.inner.end()

    def rest_dropped(self, last: bytes) -> bool:
        return self.inner.rest_dropped(last)


def is_error(body: bytes) -> bool:
    """True if a JSON body is an error in a form of vLLM or of a gateway. Errors begin with it."""
    if body.find(b'"error', 0, ERROR_BYTES) < 0 and body.find(b'"detail"', 0, ERROR_BYTES) < 0:
        return False
    try:
        found = json.decode(body)
    except UNREADABLE_JSON:
        return False
    if not isinstance(found, dict):
        return False
    told = found.get("error") or found.get("errors") or found.get("detail")
    return bool(told) or "error" in (found.get("object"), found.get("type"))


def is_error_event(event: bytes) -> bool:
    """True if an event, with its blank line, is an error."""
    lines = event.removeprefix(BOM_UTF8).splitlines()
    if b"event: error" in lines or b"event:error" in lines:
        return True
    return is_error(b"\n".join([line[5:] for line in lines if line.startswith(b"data:")]))


def _says_little(event: bytes) -> bool:
    """True for an event with nothing of an answer in it (a comment, a ping, the usage alone), and
    for one with a role and no answer."""
    if event.find(b'"delta"') < 0 and event.find(b'"text"') < 0:
        return True
    return _ROLE_ALONE.search(event, 0, ERROR_BYTES) is not None


_NOTHING: Final = rb'\s*"(?:role":\s*"\w*"|\w+":\s*(?:""|null|\[\]))\s*'
_ROLE_ALONE: Final = re.compile(rb'"delta":\s*\{' + _NOTHING + b"(?:," + _NOTHING + rb")*\}")
PASSED: Final[ReplyBody] = PassedBody()
"""It has no state, so one object serves all replies."""


def reply_body(
    *,
    status: int,
    content_type: bytes,
    encoded: bool,
    strip: Strip,
    names: Names | None = None,
) -> ReplyBody:
    """Choose one of the three ways. content_type: lower case. encoded: the reply is compressed and
    cannot be edited. names: None keeps the reply's `model`."""
    if (strip.nothing and names is None) or status != 200 or encoded:
        return PASSED
    if content_type.startswith(EVENT_STREAM):
        return EventBody(strip, names)
    if content_type.startswith(b"application/json"):
        return HeldBody(strip, names)
    return PASSED


# Write one reply to a client: its head, and its body in the framing that the client can read.


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


_CRLF: Final = b"\r\n"
_CHUNK_BEGINS: Final = tuple([b"%x\r\n" % length for length in range(1024)])


class ClientReply:
    """One reply on its way to one client."""

    def __init__(self, client: ClientSide, request: ClientRequest, *, keep_alive: bool) -> None:
        self.begun = False
        """The head is written: what happens now cannot be answered with another status."""
        self.keep_alive = keep_alive
        self._client = client
        self._request = request
        self._chunked = False

    @property
    def in_chunks(self) -> bool:
        """The head is written, and the body goes out in chunks."""
        return self.begun and self._chunked

    def write(
        self, head: ReplyHead, body: ReplyBody, out: bytes, own: Sequence[bytes], *, complete: bool
    ) -> None:
        """Write what may go out now. own: header lines of ours. complete: `out` is the last."""
        if not self.begun:
            begin = self._begin(head, body, len(out) if complete else None, own)
        elif not complete and self._chunked:  # nearly every event of a stream
            if out:
                self._client.write(_chunk(out))
            return
        else:
            begin = b""
        if not self._chunked:
            piece = begin + out
        else:
            chunk = _chunk(out) if out else b""
            piece = begin + chunk + (b"0\r\n\r\n" if complete else b"")
        if piece:
            self._client.write(piece)

    def _begin(
        self, head: ReplyHead, body: ReplyBody, whole_length: int | None, own: Sequence[bytes]
    ) -> bytes:
        self.begun = True
        bodyless = self._request.head.head_only or head.status in NO_BODY_STATUSES
        length = head.content_length
        if not bodyless and body.length != "kept":
            length = whole_length if body.length == "whole" else None
        self._chunked = length is None and not bodyless and self._request.head.http_1_1
        if length is None and not self._chunked and not bodyless:
            self.keep_alive = False  # HTTP/1.0 has no other way to end a body of unknown length
        headers = head.headers
        if not headers.written:
            headers.written = reply_lines(head.status, head.reason, headers.lines)
        return reply_head(
            headers.written,
            own=own,
            content_length=length,
            chunked=self._chunked,
            close=not self.keep_alive,
        )


def _chunk(body: bytes) -> bytes:
    length = len(body)
    begin = _CHUNK_BEGINS[length] if length < len(_CHUNK_BEGINS) else b"%x\r\n" % length
    return b"".join((begin, body, _CRLF))
