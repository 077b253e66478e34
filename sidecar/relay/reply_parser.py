"""Parse one reply of an upstream and hand its pieces on. No IO; llhttp does the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import httptools

from sidecar.relay.heads import Header, header

NO_BODY_STATUSES = frozenset({204, 304})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """Status line and headers of an upstream's reply."""

    status: int
    reason: bytes
    headers: tuple[Header, ...]
    content_length: int | None


class ReplyReader(Protocol):
    """What an upstream connection needs of the one who sent the request."""

    def reply_head(self, head: ReplyHead) -> None: ...

    def reply_body(self, data: bytes) -> None: ...

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        """All of one read is handed over. received_at: `time.perf_counter()` at its start."""

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        """The reply will not end. nothing_came: not one byte of it; reused: the connection had
        carried a request before."""


class BrokenReplyError(Exception):
    """The upstream did not speak HTTP; never leaves the relay."""


class ReplyParser:
    """One per request."""

    def __init__(self, reader: ReplyReader, *, head_only: bool) -> None:
        self.complete = False
        self.nothing_came = True
        self.keep_alive = False
        """The connection may carry another request after this reply."""
        self.ends_with_close = False
        """The reply has no length of its own: the upstream closes to end it."""
        self._reader = reader
        self._head_only = head_only
        self._head_done = self._interim = False
        self._headers: list[Header] = []
        self._reason = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take what was read. Raises: BrokenReplyError."""
        self.nothing_came = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise BrokenReplyError(str(error)) from error
            self.keep_alive = False  # the reply had ended before the rubbish began

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a reply without a request: out of step
        self._headers = []
        self._reason = b""

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # later ones are trailers of a chunked body: not passed on
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self.complete or self._interim:
            return
        self._head_done = True
        length = header(self._headers, b"content-length")
        chunked = header(self._headers, b"transfer-encoding") is not None
        bodyless = self._head_only or status in NO_BODY_STATUSES
        self.ends_with_close = length is None and not chunked and not bodyless
        self.keep_alive = self._parser.should_keep_alive() and not self.ends_with_close
        self._reader.reply_head(
            ReplyHead(
                status=status,
                reason=self._reason,
                headers=tuple(self._headers),
                content_length=int(length) if length is not None else None,
            )
        )
        # The parser does not know that a HEAD was asked for, and would wait for the body.
        self.complete = bodyless

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._reader.reply_body(data)

    def on_message_complete(self) -> None:
        if not self._interim:
            self.complete = True
