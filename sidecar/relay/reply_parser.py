"""Parse the replies of one upstream connection and hand their pieces on. No IO.

llhttp does the work, but for what needs no parser: a head that is the connection's last one once
more (`heads.py`), the body of a known length behind it, and a read of a stream that is whole
chunks and nothing else. llhttp is then left where it stands, between two messages or two chunks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Final

import httptools
from mypy_extensions import mypyc_attr

from sidecar.relay.heads import CONNECTION_HEADERS, OWN_PREFIX, HeadMemory, ReplyHeaders, drop_named

NO_BODY_STATUSES: Final = frozenset({204, 304})
MAX_HEAD_BYTES: Final = 256 * 1024
"""A longer reply head is refused."""
_OWN_LENGTH: Final = len(OWN_PREFIX)
MAX_SIZE_DIGITS: Final = 8
_HEX: Final = b"0123456789abcdefABCDEF"
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class ReplyHead:
    """Status line and headers of an upstream's reply."""

    def __init__(
        self, status: int, reason: bytes, headers: ReplyHeaders, content_length: int | None
    ) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.content_length = content_length


TABLED: Final = 2048
"""A read up to this size is recognised as one chunk by its first bytes."""
CR: Final = 13
LF: Final = 10


def _one_chunk(length: int) -> bytes:
    """The first bytes of a read of this length that is one chunk as uvicorn writes it."""
    for digits in (1, 2, 3):
        size = b"%x" % max(0, length - digits - 4)
        if len(size) == digits and size != b"0":
            return size + b"\r\n"
    return b"x" * (length + 1)  # no chunk has this length, and no read begins with more than it has


_ONE_CHUNK: Final = [_one_chunk(length) for length in range(TABLED)]


def chunk_at(data: bytes, at: int) -> tuple[int, int]:
    """Where the data of the chunk whose size is at `at` begins and ends. (-1, -1): the chunk is
    invalid, the last one, or has extensions."""
    line_end = data.find(b"\r\n", at, at + MAX_SIZE_DIGITS + 2)
    digits = data[at:line_end] if line_end > at else b""
    if not digits or digits.strip(_HEX):
        return -1, -1
    size = int(digits, 16)
    return (line_end + 2, line_end + 2 + size) if size else (-1, -1)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReplyReader(ABC):
    """Takes the reply that an upstream connection reads. (No Protocol, because a compiled call
    through one costs five times as much, and an event of a stream takes three calls.)"""

    @abstractmethod
    def reply_head(self, head: ReplyHead) -> None: ...

    @abstractmethod
    def reply_body(self, data: bytes) -> None: ...

    @abstractmethod
    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        """Take one read that is whole chunks of the body and nothing else. Returns: False to get it
        by `reply_body` and `batch_end` instead. received_at: as for `batch_end`."""

    @abstractmethod
    def batch_end(self, *, complete: bool, received_at: float) -> None:
        """One read has been handed over. received_at: when it came, by `time.perf_counter()`."""

    @abstractmethod
    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        """The connection was lost before the reply ended. nothing_came: no byte of the reply came.
        reused: the connection had carried a request before."""


class _Nobody(ReplyReader):
    """Drops a reply that nobody waits for."""

    def reply_head(self, head: ReplyHead) -> None: ...

    def reply_body(self, data: bytes) -> None: ...

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return True

    def batch_end(self, *, complete: bool, received_at: float) -> None: ...

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None: ...


NOBODY: Final[ReplyReader] = _Nobody()


class BrokenReplyError(Exception):
    """The upstream's reply is not valid HTTP. Never leaves the relay."""


class ReplyParser:
    """One for each connection; call `expect` before each reply."""

    def __init__(self) -> None:
        self._memory = HeadMemory()
        self._remembered: ReplyHead | None = None
        """The parsed form of the head that `_memory` caches."""
        self._parser = httptools.HttpResponseParser(self)

    def expect(self, reader: ReplyReader, *, head_only: bool) -> None:
        """A request was sent; its reply goes to `reader`. head_only: it has no body whatever its
        head says (HEAD)."""
        self.complete = False
        self.nothing_came = True
        self.keep_alive = False
        """The connection may carry another request after this reply."""
        self.ends_with_close = False
        """The reply has no length of its own: the upstream closes to end it."""
        self._reader = reader
        self._head_only = head_only
        self._head_done = self._interim = False
        self._head_bytes = self._body_bytes = 0
        self._head: ReplyHead | None = None
        self._first: bytes | None = None
        """The read that began the reply."""
        self._awaited = 0
        """Body bytes still to come after a recognised head."""
        self._between_chunks = False
        """llhttp waits for the size of a chunk, and has seen nothing of it."""

    def forget(self) -> None:
        """The reply has ended or nobody waits for it: drop the reference to the reader."""
        self._reader = NOBODY

    def feed(self, data: bytes) -> None:
        """Take what was read. Raises: BrokenReplyError."""
        if self._awaited:
            self._go_on_known(data)
            return
        if self.nothing_came:
            self.nothing_came = False
            head = self._remembered
            if head is not None and not self._head_only:
                at = self._memory.match(data)
                if at > 0:
                    self._begin_known(head, data, at)
                    return
            self._first = data
        self._between_chunks = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise BrokenReplyError(str(error.__context__ or error)) from error
            self.keep_alive = False  # the reply had ended before the invalid bytes began
        if not self._head_done and not self.complete:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise BrokenReplyError(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        if data[-2:] != b"\r\n":  # it may have begun to read a size
            self._between_chunks = False

    def whole_chunks(self, data: bytes) -> bool:
        """True if `data` is whole chunks of a body that goes on, and nothing else. Such a read is
        not fed: the reader passes it on unchanged, or `unframe` gives the reader its data."""
        if not self._between_chunks:
            return False
        at, stop = 0, len(data)
        if stop < TABLED and data.startswith(_ONE_CHUNK[stop]):
            return data[stop - 2] == CR and data[stop - 1] == LF
        while at < stop:
            start, end = chunk_at(data, at)
            if start < 0 or data[end : end + 2] != b"\r\n":
                return False
            at = end + 2
        return True

    def unframe(self, data: bytes) -> None:
        """Give the reader the data of chunks that `whole_chunks` recognised."""
        at, stop = 0, len(data)
        if stop < TABLED and data.startswith(_ONE_CHUNK[stop]):
            self._reader.reply_body(data[len(_ONE_CHUNK[stop]) : stop - 2])
            return
        while at < stop:
            start, end = chunk_at(data, at)
            self._reader.reply_body(data[start:end])
            at = end + 2

    def _begin_known(self, head: ReplyHead, data: bytes, at: int) -> None:
        known = self._memory.head
        assert known is not None, "it matched"
        self._head_done = self.keep_alive = True
        length = known.length
        if head.content_length != length:
            head = self._remembered = ReplyHead(head.status, head.reason, head.headers, length)
        self._reader.reply_head(head)
        self._awaited = length
        if len(data) > at or length == 0:
            self._go_on_known(data[at:])

    def _go_on_known(self, data: bytes) -> None:
        left = self._awaited - len(data)
        if left < 0:
            self.keep_alive = False  # the reply has ended before this began
            data = data[: self._awaited]
        if data:
            self._reader.reply_body(data)
        if left <= 0:
            self._awaited = 0
            self.complete = True
        else:
            self._awaited = left

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a reply without a request: out of step
        self._headers = ReplyHeaders()
        self._reason = b""

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:  # trailers of a chunked body: not passed on
            return
        headers = self._headers
        lower = name.lower()
        if lower == b"content-length":
            headers.content_length = value
            return
        if lower == b"content-type":
            headers.content_type = value.lower()
        elif lower in CONNECTION_HEADERS:
            if lower == b"connection":
                headers.connection += b"," + value
            elif lower == b"transfer-encoding":
                if headers.chunked or value.strip().lower() != b"chunked":
                    raise BrokenReplyError("Transfer-Encoding is not `chunked`")
                headers.chunked = True
            return
        elif lower == b"content-encoding":
            headers.content_encoding = value.lower()
        elif lower[:_OWN_LENGTH] == OWN_PREFIX:
            return
        headers.lines.append(name + b": " + value)

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self.complete or self._interim:
            self._first = None  # whatever ends next, it does not begin where this read began
            return
        self._head_done = True
        headers = self._headers
        if headers.connection:
            drop_named(headers.lines, headers.connection)
        if _CONTROL.search(self._reason):
            raise BrokenReplyError("control bytes in its reason phrase")
        length = headers.content_length
        bodyless = self._head_only or status in NO_BODY_STATUSES
        self.ends_with_close = length is None and not headers.chunked and not bodyless
        self.keep_alive = self._parser.should_keep_alive() and not self.ends_with_close
        self._between_chunks = headers.chunked
        head = ReplyHead(status, self._reason, headers, None if length is None else int(length))
        self._head = head
        self._reader.reply_head(head)
        if bodyless:
            # The parser does not know that a HEAD was asked for, and would wait for the body.
            self.complete = True
            self.keep_alive = self.keep_alive and status in NO_BODY_STATUSES

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = self._head_done

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._body_bytes += len(data)
            self._reader.reply_body(data)

    def on_message_complete(self) -> None:
        if self._interim:
            return
        self.complete = True
        self._between_chunks = False
        head, first = self._head, self._first
        self._head = self._first = None
        ordinary = (
            head is not None
            and first is not None
            and self.keep_alive
            and head.content_length is not None
            and head.status not in NO_BODY_STATUSES
        )
        if ordinary and first is not None and self._memory.learn(first, self._body_bytes):
            self._remembered = head
        else:
            self._remembered = None


# Split a stream of server-sent events at its blank lines, wherever the network cut it. Pure.

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
