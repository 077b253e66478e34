"""Parse what one client sends into requests, and refuse what is ambiguous or too large. No IO.

llhttp refuses most smuggling by itself (both framings, doubled or odd Content-Length, bare LF,
folded lines, a space before the colon); what it lets through, is refused here: any transfer coding
but `chunked`, a coding in HTTP/1.0, upgrades.
"""

from __future__ import annotations

from collections import deque

import httptools

from sidecar.relay.client_request import ClientRequest
from sidecar.relay.heads import Header, text_header
from sidecar.relay.refusals import Refusal, bad_framing, body_too_large, head_too_large

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128


class RequestParser:
    """Feed it bytes, take `ready` requests. After a Refusal in `ready` it takes nothing more."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self.ready: deque[ClientRequest | Refusal] = deque()
        self.in_body = False
        """A head is complete and its body is not."""
        self.begun = False
        """A request has begun and is not complete."""
        self.wants_continue = False
        """The client waits for `100 Continue` before it sends its body."""
        self._max_body_bytes = max_body_bytes
        self._refused = False
        self._raw_bytes = 0
        self._start_request()
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Take what was read. Never raises: what is wrong becomes a Refusal."""
        if self._refused:
            return
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._undo_upgrade()
        except httptools.HttpParserError as error:
            self._refuse(bad_framing(str(error)))
        if self.begun and not self._refused:
            self._check_size()

    def _check_size(self) -> None:
        if not self.in_body and self._raw_bytes > MAX_HEAD_BYTES:
            self._refuse(head_too_large(MAX_HEAD_BYTES))
        # Chunk headers and trailers count apart, so that they cannot grow without end either.
        elif self.in_body and self._raw_bytes - self._size > self._max_body_bytes + MAX_HEAD_BYTES:
            self._refuse(body_too_large(self._max_body_bytes))

    def _refuse(self, refusal: Refusal) -> None:
        if not self._refused:
            self._refused = True
            self.ready.append(refusal)

    def _undo_upgrade(self) -> None:
        # llhttp drops the body of such a request, so there is nothing to relay.
        if self.ready and isinstance(self.ready[-1], ClientRequest):
            self.ready.pop()
        self._refuse(bad_framing("this server does not upgrade connections"))

    def _start_request(self) -> None:
        self._target = b""
        self._headers: list[Header] = []
        self._body: list[bytes] = []
        self._size = 0

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self._start_request()
        self.begun = True

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_body:  # later ones are trailers of a chunked body: not passed on
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.in_body = True
        coding = text_header(self._headers, b"transfer-encoding").lower()
        length = text_header(self._headers, b"content-length")
        version = self._parser.get_http_version()
        if len(self._headers) > MAX_HEADERS:
            self._refuse(head_too_large(MAX_HEAD_BYTES))
        elif version not in ("1.0", "1.1"):
            self._refuse(bad_framing(f"HTTP/{version}"))
        elif coding and (coding != "chunked" or length or version == "1.0"):
            self._refuse(bad_framing("Transfer-Encoding"))
        elif length and int(length) > self._max_body_bytes:
            self._refuse(body_too_large(self._max_body_bytes))
        expects = text_header(self._headers, b"expect").lower()
        self.wants_continue = expects == "100-continue" and version == "1.1" and not self._refused

    def on_body(self, data: bytes) -> None:
        self.wants_continue = False
        self._size += len(data)
        if self._size > self._max_body_bytes:
            self._refuse(body_too_large(self._max_body_bytes))
        elif not self._refused:
            self._body.append(data)

    def on_message_complete(self) -> None:
        self.begun = self.in_body = self.wants_continue = False
        self._raw_bytes = 0
        if self._refused:
            return
        http_1_1 = self._parser.get_http_version() == "1.1"
        self.ready.append(
            ClientRequest(
                method=self._parser.get_method(),
                target=self._target,
                headers=tuple(self._headers),
                body=b"".join(self._body),
                http_1_1=http_1_1,
                keep_alive=http_1_1 and self._parser.should_keep_alive(),
            )
        )
        self._start_request()
