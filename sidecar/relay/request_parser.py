"""Parse the bytes of one client into requests; refuse ambiguous and too large ones. No IO.

llhttp refuses most request smuggling by itself (both framings, repeated or odd Content-Length, bare
LF, folded lines, a space before the colon). This module refuses the rest: any transfer coding but
`chunked`, a coding in HTTP/1.0, `CONNECT`, other protocols than HTTP, a missing or doubled
Host, a target with a fragment.

`Upgrade` is ignored, as RFC 9110 section 7.8 allows: Java's HTTP client sends `Upgrade: h2c` with
its first request, and goes on in HTTP/1.1 when it gets no 101.

A head that repeats the connection's last one is not parsed again (`heads.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import httptools

from sidecar.relay.context import BodyPieces, ClientRequest, RequestHead
from sidecar.relay.heads import (
    ASIDE,
    JOINED,
    OWN_PREFIX,
    PASSED_ON,
    READ_TOO,
    HeadMemory,
    RequestHeaders,
)
from sidecar.relay.refusals import Refusal, bad_framing, body_too_large, head_too_large

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 128
CHUNK_OVERHEAD_BYTES: Final = 16
"""Bytes of framing allowed for each chunk of a body, beside `MAX_HEAD_BYTES` in total (Go's rule,
made after CVE-2023-39326): endless extensions and trailers would escape the limit on bodies."""
_OWN_LENGTH: Final = len(OWN_PREFIX)


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
        self.body_bytes = 0
        """Bytes received of the current body."""
        self.head: RequestHead | None = None
        """Head of the request whose body is being received."""
        self._max_body_bytes = max_body_bytes
        self._refused = False
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._http_1_1 = True
        self._body = BodyPieces()
        self._chunks: int | None = None
        """Chunk heads received; None: the body is not chunked."""
        self._memory = HeadMemory()
        self._remembered: RequestHead | None = None
        """The head whose bytes `_memory` holds."""
        self._awaited = 0
        """Bytes of the body still missing, behind a recognised head."""
        self._upgrading = False
        """The head asks for an upgrade, which is ignored, and its body is not being read yet."""
        self._length = 0
        """Length of the body behind a parsed head, unless it is chunked."""
        self._first: bytes | None = None
        """The read in which the request began, if the request began at its first byte."""
        self._start_request()
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Parse the bytes of one read. Never raises: an invalid request becomes a Refusal."""
        if self._refused:
            return
        if not self.begun:
            head = self._remembered
            at = -1 if head is None else self._memory.match(data)
            if head is None or at < 0 or not self._begin_known(head, data, at):
                self._first = data
                self._parse(data)
        elif self._awaited:
            self._go_on_known(data)
        else:
            self._parse(data)

    def _begin_known(self, head: RequestHead, data: bytes, at: int) -> bool:
        """Begin the body of a recognised head, at offset `at`. Returns: False when the parser must
        read the request all the same."""
        known = self._memory.head
        assert known is not None, "it matched"
        length, came = known.length, len(data) - at
        if came > length or length > self._max_body_bytes:
            return False
        if came == length:
            self.ready.append(ClientRequest(head, data[at:]))
            return True
        self.begun = self.in_body = True
        self.head = head
        self._awaited = length - came
        self.body_bytes = came
        if came:
            self._body.add(data[at:])
        return True

    def _go_on_known(self, data: bytes) -> None:
        head, rest = self.head, b""
        assert head is not None, "its body is coming in"
        if len(data) > self._awaited:  # pipelined
            data, rest = data[: self._awaited], data[self._awaited :]
        self._awaited -= len(data)
        self.body_bytes += len(data)
        self._body.add(data)
        if self._awaited:
            return
        self._end_known(head, self._body.take())
        if rest:
            self.feed(rest)

    def _end_known(self, head: RequestHead, body: bytes) -> None:
        self.ready.append(ClientRequest(head, body))
        self.begun = self.in_body = False
        self.body_bytes = self._awaited = 0
        self.head = None

    def may_bring_more_than(self, length: int) -> bool:
        """True if Content-Length exceeds `length`, or the body is chunked."""
        return self._chunks is not None or self.announced > length

    @property
    def announced(self) -> int:
        """Content-Length of the body that is being received; 0 when it is chunked, or there is
        none."""
        if not self.in_body or self._chunks is not None:
            return 0
        return self.body_bytes + self._awaited if self._awaited else self._length

    def drop_body(self) -> None:
        """Drop the bytes of the current body: its request will not be answered."""
        self._body.take()

    def _parse(self, data: bytes) -> None:
        self._raw_bytes += len(data)
        if not self.in_body:
            self._raw.append(data)
        try:
            while data:
                data = self._feed_parser(data)
        except httptools.HttpParserError as error:
            self._refuse(bad_framing(str(error)))
        if self.begun:
            self._check_size()
        elif self._raw:
            self._raw.clear()

    def _check_size(self) -> None:
        if not self.in_body:
            if self._raw_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large(MAX_HEAD_BYTES))
        else:
            self._raw.clear()
            if self._chunks is not None:
                self._check_overhead(self._chunks)

    def _check_overhead(self, chunks: int) -> None:
        around = self._raw_bytes - self.body_bytes
        if around > MAX_HEAD_BYTES + CHUNK_OVERHEAD_BYTES * chunks:
            self._refuse(bad_framing("too much stands around the chunks of the body"))

    def _refuse(self, refusal: Refusal) -> None:
        if not self._refused:
            self._refused = True
            self.drop_body()
            self.ready.append(refusal)

    def _feed_parser(self, data: bytes) -> bytes:
        """Returns: what the parser left, which stands behind a head that asks for an upgrade.
        Raises: HttpParserError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._refused:
                return b""
            rest: int = upgrade.args[0]
            self._ignore_upgrade()
            return data[rest:]
        return b""

    def _ignore_upgrade(self) -> None:
        """Read on as if the head had not asked for an upgrade. llhttp takes everything behind such
        a head for another protocol, so a new parser reads the body: it is given a head that says
        no more than how the body is framed, by what the first parser has read and checked."""
        head = self.head
        assert head is not None, "its head is complete"
        self._first = None  # a head that needs this is not recognised by its bytes
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(
            b"POST / HTTP/1.%d\r\n%b%b\r\n"
            % (
                self._http_1_1,
                b"Transfer-Encoding: chunked\r\n"
                if self._chunks is not None
                else b"Content-Length: %d\r\n" % self._length,
                b"" if head.keep_alive else b"Connection: close\r\n",
            )
        )

    def _start_request(self) -> None:
        self._target = b""
        self._headers = RequestHeaders()
        self._lines = self._headers.lines
        self._aside = self._headers.aside
        self._doubled_host = False
        self._count = 0
        self.body_bytes = 0
        self._chunks = None

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self.begun = True

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_body:  # trailers of a chunked body: not passed on
            return
        self._count += 1
        if name in PASSED_ON:  # the usual spellings, known to be nobody's
            self._lines.append(name + b": " + value)
            return
        lower = name.lower()
        if lower in ASIDE or lower[:_OWN_LENGTH] == OWN_PREFIX:
            aside = self._aside
            if lower not in aside:
                aside[lower] = value
            elif lower in JOINED:
                aside[lower] += b"," + value
            elif lower == b"host":
                self._doubled_host = True
            return
        if lower in READ_TOO:
            self._aside.setdefault(lower, value)
        self._headers.read_session(lower, value)
        self._lines.append(name + b": " + value)

    def on_headers_complete(self) -> None:
        if self._upgrading:  # the head that `_ignore_upgrade` made
            self._upgrading = False
            return
        self.in_body = True
        headers, aside = self._headers, self._aside
        self._http_1_1 = self._parser.get_http_version() == "1.1"
        if b"connection" in aside:
            headers.end()
        if b"transfer-encoding" in aside:
            self._chunks = 0
        wrong = self._wrong_head()
        if wrong is not None:
            self._refuse(wrong)
            return
        parser = self._parser
        self._upgrading = parser.should_upgrade()
        self.head = RequestHead(
            parser.get_method(),
            self._target,
            headers,
            self._http_1_1,
            self._http_1_1 and parser.should_keep_alive(),
        )
        if b"expect" in aside and self._http_1_1:
            self.wants_continue = aside[b"expect"].strip().lower() == b"100-continue"

    def _wrong_head(self) -> Refusal | None:
        aside = self._aside
        if self._count > MAX_HEADERS:
            return head_too_large(MAX_HEAD_BYTES)
        if self._parser.get_method() == b"CONNECT":
            return bad_framing("this server opens no tunnels")
        if self._raw_bytes > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            return head_too_large(MAX_HEAD_BYTES)
        if not self._http_1_1:
            version = self._parser.get_http_version()
            # llhttp takes RTSP/1.0 and ICE/1.0 too.
            line = b"%b %b HTTP/1.0\r\n" % (self._parser.get_method(), self._target)
            if version != "1.0" or line not in b"".join(self._raw):
                return bad_framing(f"not HTTP/1.1 or HTTP/1.0 (version {version})")
        elif b"host" not in aside or self._doubled_host:
            return bad_framing("a request has one Host")
        if b"#" in self._target:
            return bad_framing("a fragment in the request's target")
        if self._chunks is not None:
            coding = aside[b"transfer-encoding"].strip().lower()
            if coding != b"chunked" or b"content-length" in aside or not self._http_1_1:
                return bad_framing("Transfer-Encoding")
        else:
            self._length = int(aside.get(b"content-length", 0))
            if self._length > self._max_body_bytes:
                return body_too_large(self._max_body_bytes)
        return None

    def _head_bytes(self) -> int:
        """A lower bound of the head's length."""
        lines = sum(len(line) + 2 for line in self._lines)
        kept = sum(len(name) + len(value) + 4 for name, value in self._aside.items())
        return len(self._target) + lines + kept

    def on_chunk_header(self) -> None:
        if self._chunks is not None:
            self._chunks += 1

    def on_body(self, data: bytes) -> None:
        self.wants_continue = False
        self.body_bytes += len(data)
        if self.body_bytes > self._max_body_bytes:
            self._refuse(body_too_large(self._max_body_bytes))
        elif not self._refused:
            self._body.add(data)

    def on_message_complete(self) -> None:
        if self._upgrading:  # llhttp ends the message at its head
            return
        if self._chunks is not None:
            self._check_overhead(self._chunks)
        head = self.head
        self.begun = self.in_body = self.wants_continue = False
        self._raw_bytes = 0
        self.head = None
        if self._refused or head is None:
            return
        if self._chunks is not None and not self._parser.should_keep_alive():
            head.keep_alive = False  # to llhttp a trailer's `Connection: close` ends it too
        whole = self._body.take()
        self._remember(head, whole)
        self.ready.append(ClientRequest(head, whole))
        self._start_request()

    def _remember(self, head: RequestHead, body: bytes) -> None:
        """Remember this head, if it is an ordinary one with a Content-Length."""
        first, self._first = self._first, None
        ordinary = head.keep_alive and self._chunks is None and b"expect" not in head.headers.aside
        if first is not None and ordinary and self._memory.learn(first, len(body)):
            self._remembered = head
        else:
            self._remembered = None


# Pipelined bytes of a connection that wait to be parsed. No IO.

SMALL_BYTES: Final = 4096
"""A piece under this size is joined with the next one: a client may send a byte at a time, and each
piece is an object."""


class EarlyBytes:
    """A queue of bytes: `add` reads, `take` them in order."""

    def __init__(self) -> None:
        self.pieces: deque[bytes] = deque()
        self._at = 0
        """Bytes of the first piece already taken."""
        self.size = 0
        """Bytes not taken yet."""

    def add(self, data: bytes) -> None:
        pieces = self.pieces
        if pieces and len(pieces[-1]) < SMALL_BYTES:
            pieces[-1] += data
        else:
            pieces.append(data)
        self.size += len(data)

    def take(self, most: int) -> bytes:
        """Take the next bytes: at most `most`, and none beyond the first piece."""
        first, at = self.pieces[0], self._at
        end = at + most
        data = first[at:end] if at or end < len(first) else first
        if end < len(first):
            self._at = end
        else:
            self._at = 0
            self.pieces.popleft()
        self.size -= len(data)
        return data

    def clear(self) -> None:
        self.pieces.clear()
        self._at = self.size = 0
