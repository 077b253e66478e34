"""The heads of requests and replies: what is passed on, what is kept aside, and how one is written.

Headers pass both ways as they came, spelling included, except those that belong to one connection
(RFC 9110 section 7.6.1) and the sidecar's own. Each header is sorted once, while it is parsed.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from sidecar.access.denials import AUTHORIZATION, ORIGIN, X_API_KEY

Header = tuple[bytes, bytes]

CONNECTION_HEADERS: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
ACCEPT_ENCODING: Final = b"accept-encoding"
TRACEPARENT: Final = b"traceparent"
RETRY_COUNT: Final = b"x-stainless-retry-count"
IDEMPOTENCY_KEY: Final = b"idempotency-key"
SENT_ON_DEMAND: Final = (AUTHORIZATION, X_API_KEY, ACCEPT_ENCODING, TRACEPARENT)
"""Kept apart: `UpstreamAttempt` decides whether to send them."""
OWN_PREFIX: Final = b"x-sidecar-"
ASIDE: Final = CONNECTION_HEADERS | {b"host", b"content-length", b"expect", *SENT_ON_DEMAND}
"""Request headers that are not passed on unchanged."""
JOINED: Final = frozenset({b"connection", b"transfer-encoding", AUTHORIZATION, X_API_KEY})
"""Repeated values of these are joined: a repeated key is then not a valid key."""
READ_TOO: Final = frozenset({RETRY_COUNT, IDEMPOTENCY_KEY, ORIGIN})
_SESSION_NAMES: Final = (
    # Of sub-agents: opencode, Codex. What they name is the session of the main agent.
    b"x-parent-session-id", b"x-codex-parent-thread-id",
    # Claude Code, opencode, Codex, Qwen Code, Open WebUI: each draws one for each conversation.
    b"x-claude-code-session-id", b"x-opencode-session", b"session-id", b"session_id",
    b"conversation_id", b"x-qwen-code-session-id", b"x-openwebui-chat-id",
    # Sent by many: opencode, gateways, applications. It may be the name of a whole process.
    b"x-session-id", b"x-session-affinity", b"x-litellm-session-id", b"helicone-session-id",
    b"conversation-id", b"x-conversation-id", b"x-chat-id", b"x-thread-id", b"x-task-id",
)  # fmt: skip
SESSION_RANKS: Final = {name: rank for rank, name in enumerate(_SESSION_NAMES)}
"""Headers that name a session, by their rank: of several the lowest counts."""
ANY_SESSION: Final = len(_SESSION_NAMES)
ANY_CLIENT: Final = SESSION_RANKS[b"x-session-id"]
"""From this rank on, the name may be one of a whole application."""
NO_SESSION: Final = ANY_SESSION + 1
_AGENTS_SEND: Final = (
    b"Accept", b"Content-Type", b"User-Agent", b"X-Stainless-Lang", b"X-Stainless-OS",
    b"X-Stainless-Arch", b"X-Stainless-Runtime", b"X-Stainless-Runtime-Version",
    b"X-Stainless-Package-Version", b"X-Stainless-Async", b"x-stainless-read-timeout",
    b"Anthropic-Version", b"anthropic-beta", b"X-Request-Id", b"OpenAI-Organization",
)  # fmt: skip
PASSED_ON: Final = frozenset(_AGENTS_SEND) | frozenset(name.lower() for name in _AGENTS_SEND)
"""Header spellings of the usual SDKs, which are passed on unchecked. For speed only."""
EVENT_STREAM: Final = b"text/event-stream"
_ORDINARY_CONNECTION: Final = frozenset({b"keep-alive", b"close"})


class RequestHeaders:
    """The headers of one request, sorted by `RequestParser`."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        """`name: value` lines that are passed on unchanged."""
        self.session_name = b""
        """Of the headers that name a session, the one with the lowest rank; passed on, too."""
        self.session_rank = NO_SESSION
        self.aside: dict[bytes, bytes] = {}
        """By lower-case name: what the relay reads or decides about. The first of a name counts,
        as it does for vLLM; those in `JOINED` are joined by commas."""

    def read_session(self, name: bytes, value: bytes) -> None:
        """Note a header that may name the session. name: in lower case."""
        rank = SESSION_RANKS.get(name, NO_SESSION)
        if rank == NO_SESSION and name.endswith(b"-session-id"):  # of whatever client
            rank = ANY_SESSION
        if rank < self.session_rank and value.strip(b" \t"):
            self.session_name, self.session_rank = value, rank

    def end(self) -> None:
        """The head is complete: drop the other headers that `Connection` names."""
        connection = self.aside.get(b"connection")
        if connection is not None and connection.lower() not in _ORDINARY_CONNECTION:
            drop_named(self.lines, connection)
            for name in connection_names(connection):
                if name in SENT_ON_DEMAND:
                    self.aside.pop(name, None)

    def text(self, name: bytes) -> str:
        """A header kept aside as text; empty when absent. Bytes that are not UTF-8 stay apart
        (backslashes)."""
        value = self.aside.get(name)
        return "" if value is None else value.decode("utf-8", "backslashreplace").strip()


class ReplyHeaders:
    """The headers of one reply, sorted by `ReplyParser`."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.written = b""
        """The bytes last written of them to a client, cached: the same headers come often."""
        self.content_length: bytes | None = None
        self.chunked = False
        self.content_type = b""
        self.content_encoding = b""
        self.connection = b""

    @property
    def streams(self) -> bool:
        """The body is a stream of server-sent events."""
        return self.content_type.startswith(EVENT_STREAM)

    @property
    def encoded(self) -> bool:
        """The body is compressed."""
        return self.content_encoding not in (b"", b"identity")


def connection_names(value: bytes) -> frozenset[bytes]:
    """The lower-case names that the value of `Connection` lists."""
    return frozenset(name.strip().lower() for name in value.split(b",")) - {b""}


def drop_named(lines: list[bytes], connection: bytes) -> None:
    named = connection_names(connection)
    lines[:] = [line for line in lines if line.partition(b":")[0].lower() not in named]


def request_lines(method: bytes, target: bytes, lines: Iterable[bytes], *, host: bytes) -> bytes:
    """The head of a request to an upstream, without Content-Length, the last line's end and the
    blank line. lines: each `name: value`."""
    return b"\r\n".join((b"%b %b HTTP/1.1\r\nHost: %b" % (method, target, host), *lines))


def header_lines(headers: Iterable[Header]) -> tuple[bytes, ...]:
    return tuple(name + b": " + value for name, value in headers)


def reply_lines(status: int, reason: bytes, lines: Iterable[bytes]) -> bytes:
    """The part of a reply's head that comes from vLLM: all but the body's framing. lines: each
    `name: value`."""
    return b"\r\n".join((b"HTTP/1.1 %d %b" % (status, reason), *lines))


def reply_head(
    first: bytes,
    *,
    own: Sequence[bytes] = (),
    content_length: int | None,
    chunked: bool,
    close: bool,
) -> bytes:
    """The head of a reply to the client, blank line included. first: `reply_lines`. own: `name:
    value` lines. content_length: None: chunked, no body, or ended by the close."""
    pieces = [first, *own]
    if content_length is not None:
        pieces.append(b"content-length: %d" % content_length)
    if chunked:
        pieces.append(b"transfer-encoding: chunked")
    if close:
        pieces.append(b"connection: close")
    pieces.append(b"\r\n")
    return b"\r\n".join(pieces)


# Recognise a head that was parsed before, so that it need not be parsed again. Pure.

MAX_HEAD_BYTES: Final = 8192
"""Longest head that is cached; each open connection caches one."""
MAX_DIGITS: Final = 15
ZERO: Final = 48
"""ASCII code of the digit 0."""
GIVE_UP_AFTER: Final = 8
"""After this many heads in a row that differ from the one before, a connection caches no more."""
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n")
HEAD_END = b"\r\n\r\n"


class KnownHead:
    """A head without the digits of its Content-Length."""

    def __init__(self, before: bytes, after: bytes) -> None:
        """before: up to the digits. after: from behind them to the blank line, included."""
        self._before = before
        self._after = after
        self.length = 0
        """Length of the body, from the head that was matched last."""

    def match(self, data: bytes) -> int:
        """Return where the body begins in `data`, and set `length`; -1 when `data` does not begin
        with this head."""
        before = self._before
        if not data.startswith(before):
            return -1
        # Digit by digit: compiled, this is a tenth of what slicing and int() cost.
        at, length = len(before), 0
        stop = min(len(data), at + MAX_DIGITS)
        start = at
        while at < stop:
            digit = data[at] - ZERO
            if digit < 0 or digit > 9:
                break
            length = length * 10 + digit
            at += 1
        end = at + len(self._after)
        if at == start or data[at:end] != self._after:
            return -1
        self.length = length
        return end


class HeadMemory:
    """The last head of one connection."""

    def __init__(self) -> None:
        self.head: KnownHead | None = None
        self._unlike = 0

    def match(self, data: bytes) -> int:
        """As `KnownHead.match`; it sets `head.length`."""
        head = self.head
        if head is None:
            return -1
        at = head.match(data)
        if at > 0:
            self._unlike = 0
        return at

    def learn(self, first: bytes, body_length: int) -> bool:
        """Cache a head that was accepted. first: the first read of its message, from the message's
        first byte. body_length: of the body that followed, which the head must have announced.
        Returns: False when it is not cached; then no older head is either."""
        self.head = None
        if self._unlike >= GIVE_UP_AFTER:
            return False
        self._unlike += 1
        end = first.find(HEAD_END, 0, MAX_HEAD_BYTES) + len(HEAD_END)
        if end < len(HEAD_END):
            return False
        found = _LENGTH.search(first, 0, end)
        if found is None or int(found[1]) != body_length:
            return False
        start, stop = found.span(1)
        self.head = KnownHead(first[:start], first[stop:end])
        return True
