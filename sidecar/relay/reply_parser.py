"""Parse the replies of one upstream connection and hand their pieces on. No IO; llhttp does the
work.
"""

from __future__ import annotations

import re
from typing import Protocol

import httptools

from sidecar.relay.heads import CONNECTION_HEADERS, OWN_PREFIX, ReplyHeaders

NO_BODY_STATUSES = frozenset({204, 304})
MAX_HEAD_BYTES = 256 * 1024
"""A reply head longer than this is not one."""
_OWN_LENGTH = len(OWN_PREFIX)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class ReplyHead:
    """Status line and headers of an upstream's reply."""

    __slots__ = ("content_length", "headers", "reason", "status")

    def __init__(
        self, status: int, reason: bytes, headers: ReplyHeaders, content_length: int | None
    ) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.content_length = content_length


class ReplyReader(Protocol):
    """What an upstream connection needs of the one who sent the request."""

    def reply_head(self, head: ReplyHead) -> None: ...

    def reply_body(self, data: bytes) -> None: ...

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        """All of one read is handed over. received_at: `time.perf_counter()` at its start."""

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        """The reply will not end. nothing_came: not one byte of it; reused: the connection had
        carried a request before."""


class _Nobody:
    """Reads what nobody asked for."""

    def reply_head(self, head: ReplyHead) -> None: ...

    def reply_body(self, data: bytes) -> None: ...

    def batch_end(self, *, complete: bool, received_at: float) -> None: ...

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None: ...


NOBODY = _Nobody()


class BrokenReplyError(Exception):
    """The upstream did not speak HTTP; never leaves the relay."""


class ReplyParser:
    """One per connection; `expect` begins each reply."""

    __slots__ = (
        "_head_bytes",
        "_head_done",
        "_head_only",
        "_headers",
        "_interim",
        "_parser",
        "_reader",
        "_reason",
        "complete",
        "ends_with_close",
        "keep_alive",
        "nothing_came",
    )

    def __init__(self) -> None:
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
        self._head_bytes = 0

    def forget(self) -> None:
        """The reply has ended or is not waited for: hold on to nobody."""
        self._reader = NOBODY

    def feed(self, data: bytes) -> None:
        """Take what was read. Raises: BrokenReplyError."""
        self.nothing_came = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise BrokenReplyError(str(error.__context__ or error)) from error
            self.keep_alive = False  # the reply had ended before the rubbish began
        if not self._head_done and not self.complete:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise BrokenReplyError(f"its head is longer than {MAX_HEAD_BYTES} bytes")

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
            return
        self._head_done = True
        headers = self._headers
        if headers.connection:
            headers.end()
        if _CONTROL.search(self._reason):
            raise BrokenReplyError("control bytes in its reason phrase")
        length = headers.content_length
        bodyless = self._head_only or status in NO_BODY_STATUSES
        self.ends_with_close = length is None and not headers.chunked and not bodyless
        self.keep_alive = self._parser.should_keep_alive() and not self.ends_with_close
        self._reader.reply_head(
            ReplyHead(status, self._reason, headers, None if length is None else int(length))
        )
        if bodyless:
            # The parser does not know that a HEAD was asked for, and would wait for the body.
            self.complete = True
            self.keep_alive = self.keep_alive and status in NO_BODY_STATUSES

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._reader.reply_body(data)

    def on_message_complete(self) -> None:
        if not self._interim:
            self.complete = True
