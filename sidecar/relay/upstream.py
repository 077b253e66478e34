"""Connections to one server behind the relay (vLLM, or our own application), kept and re-used.

A connection carries one request at a time. It parses the reply's framing, hands the pieces to
its reader, and goes back to the pool when the reply has ended cleanly. It does not decide on
retries: it says what it knows (nothing came, it was used before) and the reader decides.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

from sidecar.backoff import Backoff
from sidecar.errors import OutOfFilesError, SettingsError, UpstreamError
from sidecar.processes import OUT_OF_FILES
from sidecar.relay.reply_parser import BrokenReplyError, ReplyParser, ReplyReader
from sidecar.relay.request_edit import JOINED_BYTES, PiecedBody
from sidecar.unix_socket import kernel_path

_now: Final = perf_counter


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server listens."""

    url: str
    """As log lines, errors and records show it."""
    host: str = ""
    port: int = 0
    prefix: bytes = b""
    """The path of the base URL, which is put before every path."""
    tls: bool = False
    unix_path: Path | None = None

    @cached_property
    def authority(self) -> bytes:
        if self.unix_path is not None:
            return b"localhost"
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{name}:{self.port}".encode()


def endpoint(url: str) -> Endpoint:
    """Read a base URL. Raises SettingsError when it is not one."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"serving.upstreams: {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"serving.upstreams: {url} is not http://host:port or https://host")
    tls = parts.scheme == "https"
    return Endpoint(
        url=url.rstrip("/"),
        host=parts.hostname,
        port=port or (443 if tls else 80),
        prefix=parts.path.rstrip("/").encode(),
        tls=tls,
    )


class SendingConnection(Protocol):
    """What a flight uses of its upstream connection."""

    def send(
        self, reader: ReplyReader, head: bytes, body: bytes | PiecedBody, *, head_only: bool
    ) -> None: ...

    def abort(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection; see the module's docstring."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._reader: ReplyReader | None = None
        self._reply = ReplyParser()
        self._paused = False
        self.reused = False
        """It waited in the pool, so the server may have closed it unnoticed."""

    # -- for the sender

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self, reader: ReplyReader, head: bytes, body: bytes | PiecedBody, *, head_only: bool
    ) -> None:
        """Send a request. head_only: the reply has no body whatever its head says (HEAD). A
        connection that is dead already says so through `upstream_lost`, like any other."""
        transport = self._transport
        assert transport is not None, "connections are handed out open"
        self._reader = reader
        self._reply.expect(reader, head_only=head_only)
        if isinstance(body, bytes):
            if len(body) <= JOINED_BYTES:
                transport.write(head + body)
            else:
                transport.writelines((head, body))
        else:
            transport.writelines((head, *body.pieces))

    def abort(self) -> None:
        """Drop the request at once: vLLM stops generating when its client goes away."""
        self._reader = None
        self._reply.forget()
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading: the client is slower than vLLM."""
        if not self._paused and self.usable and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.usable and self._transport is not None:
            self._transport.resume_reading()
        self._paused = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        no_delay(self._transport)

    def data_received(self, data: bytes) -> None:
        received_at = _now()
        reader, reply = self._reader, self._reply
        if reader is None:  # bytes without a request: the connection is out of step
            self.close()
            return
        if reply.whole_chunks(data):  # nearly every event of a stream
            if not reader.pass_chunks(data, received_at):
                reply.unframe(data)
                reader.batch_end(complete=False, received_at=received_at)
            return
        try:
            reply.feed(data)
        except BrokenReplyError as error:
            self._reader = None
            self.close()
            reader.upstream_lost(f"not an HTTP reply: {error}", nothing_came=False, reused=False)
            return
        if reply.complete:
            self._release(reply)
        reader.batch_end(complete=reply.complete, received_at=received_at)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        reader, reply = self._reader, self._reply
        self._reader = self._transport = None
        reply.forget()
        if reader is None:
            return
        if error is None and reply.ends_with_close:
            reader.batch_end(complete=True, received_at=_now())
            return
        why = f"connection lost: {error}" if error else "connection closed before the reply's end"
        reader.upstream_lost(why, nothing_came=reply.nothing_came, reused=self.reused)

    def close(self) -> None:
        """Close when everything written is sent."""
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.close()

    def _release(self, reply: ReplyParser) -> None:
        self._reader = None
        reply.forget()
        if self._paused:
            self.resume()
        transport = self._transport
        # Unsent bytes belong to a request that vLLM answered before it had read it all. (A closing
        # connection is found out when it is taken from the pool.)
        if reply.keep_alive and transport is not None and transport.get_write_buffer_size() == 0:
            self._pool.give_back(self)
        else:
            self.close()


class UpstreamPool:
    """Open connections to one endpoint. The last one used is the first one taken: it is the least
    likely to have been closed by the server's idle timer (5 s in vLLM's uvicorn)."""

    def __init__(self, where: Endpoint, *, connect_timeout_s: float) -> None:
        self.endpoint = where
        self.connect_timeout_s = connect_timeout_s
        self._idle: deque[UpstreamConnection] = deque()
        self._closed = False
        self._tls = ssl.create_default_context() if where.tls else None

    def take_idle(self) -> UpstreamConnection | None:
        """A connection that was used before and seems alive, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.reused = True
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises UpstreamError with the reason."""
        loop = asyncio.get_running_loop()
        where = self.endpoint
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                if where.unix_path is not None:
                    with kernel_path(where.unix_path) as name:
                        _, connection = await loop.create_unix_connection(
                            lambda: UpstreamConnection(self), name
                        )
                else:
                    _, connection = await loop.create_connection(
                        lambda: UpstreamConnection(self), where.host, where.port, ssl=self._tls
                    )
        except TimeoutError as error:
            raise UpstreamError(f"no connection within {self.connect_timeout_s:g} s") from error
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in OUT_OF_FILES:
                raise OutOfFilesError(f"{why} in the sidecar itself") from error
            raise UpstreamError(why) from error
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        if self._closed:
            connection.abort()
        else:
            self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections; those in use close when their reply has ended."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


def no_delay(transport: asyncio.Transport) -> None:
    """Send small pieces at once. Without it a token waits for the acknowledgement of the last one
    (40 ms on Linux: the figure that two gateways show in `GetBusbar/benchmarking`)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# Which of the sidecar's own additions to a request one vLLM takes. Pure.

CAPTURE: Final = 1
"""`return_token_ids`, `logprobs`, and no `Accept-Encoding`: a compressed reply cannot be edited."""
USAGE: Final = 2
"""For a key with an allowance of tokens: `stream_options.include_usage`, no `Accept-Encoding`."""
TRACE: Final = 4
"""A `traceparent` of the sidecar's."""
KINDS: Final = {CAPTURE: "capture", USAGE: "usage", TRACE: "trace"}
"""Kinds of additions, bits of a set, and their names in metrics and logs."""
EVERY: Final = CAPTURE | USAGE | TRACE
REFUSALS: Final = 3
"""Refusals in a row until a kind is left out, as failures until a vLLM is (`FAILURES_TO_EJECT`). An
engine that refuses some requests only, such as those with tools, goes on being asked."""
AGAIN: Final = Backoff(first_s=30.0, last_s=600.0)
"""Waits until a kind that is left out is tried again: each try may cost one user a second wait."""
BUSY: Final = frozenset({429, 502, 503, 504, 529})
"""Statuses by which a server says that it has too much to do."""
BUSY_PAUSE_S: Final = 1.0
"""For this time after a request without additions failed with one of them too, a busy vLLM is not
asked again: asking each again would double the load of an outage."""


class OwnFields:
    """The state of one vLLM, in one process. Sets of kinds are sums of their bits."""

    def __init__(self) -> None:
        self.refused = 0
        """Kinds that are left out."""
        self.unproven = EVERY
        """Kinds with which no request has succeeded since the start, or since the last refusal."""
        self._refusals = dict.fromkeys(KINDS, 0)
        self._again_at = dict.fromkeys(KINDS, 0.0)
        self._busy_until = 0.0

    def to_send(self, kinds: int, now: float) -> int:
        """Return those of `kinds` to send now. now: seconds on the monotonic clock."""
        for kind in KINDS:
            if kinds & kind & self.refused:
                if now < self._again_at[kind]:
                    kinds &= ~kind
                else:
                    self._wait(kind, now)  # the others go on without it while this one tries
        return kinds

    def may_ask_plainly(self, status: int, now: float) -> bool:
        """True if a request with additions that failed with `status` is sent again without them."""
        return status not in BUSY or now >= self._busy_until

    def failed_plainly(self, status: int, now: float) -> None:
        """Note that a request failed with `status` when it was sent again without additions."""
        if status in BUSY:
            self._busy_until = now + BUSY_PAUSE_S

    def took(self, kinds: int) -> int:
        """Note that a request with `kinds` succeeded. Returns: those that were left out before."""
        back = self.refused & kinds
        self.unproven &= ~kinds
        self.refused &= ~kinds
        for kind in KINDS:
            if kinds & kind:
                self._refusals[kind] = 0
        return back

    def refuses(self, kinds: int, now: float) -> int:
        """Note that a request with `kinds` failed, and that it succeeded without them. Returns: the
        kind that is left out from now on; 0: none is. One kind is blamed: the first that is not
        proven, else the first. A wrongly blamed one proves itself at the next try."""
        suspects = kinds & self.unproven or kinds
        kind = suspects & -suspects
        self.unproven |= kind
        self._refusals[kind] += 1
        if self._refusals[kind] < REFUSALS:
            return 0
        found = kind & ~self.refused
        self.refused |= kind
        self._wait(kind, now)
        return found

    def _wait(self, kind: int, now: float) -> None:
        self._again_at[kind] = now + AGAIN.wait_s(max(1, self._refusals[kind] - REFUSALS + 1))
