"""One client connection: an asyncio protocol that reads requests and starts their flights.

Requests are answered one at a time and in order. While one is in flight the connection goes on
reading, because a read is how it learns that the client has left. Pipelined bytes wait unparsed;
when too many wait, reading stops.

One connection never blocks the event loop for the others: in one iteration it parses about
`SLICE_BYTES` of small messages and begins `REQUESTS_AT_ONCE` requests, then yields to the loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import termios
from collections.abc import Callable
from time import perf_counter
from typing import Final, cast

from sidecar.relay.client.body_watch import BodyWatch
from sidecar.relay.client.early_bytes import EarlyBytes
from sidecar.relay.client.reception import receive
from sidecar.relay.client.request_parser import RequestParser
from sidecar.relay.flight.client_request import ClientRequest
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.flight import Flight
from sidecar.relay.surface.refusals import Refusal, refusal_reply, too_slow
from sidecar.relay.upstream.connection import no_delay

MAX_EARLY_BYTES: Final = 64 * 1024
"""Pipelined bytes that wait for the request in flight."""
REQUESTS_AT_ONCE: Final = 16
"""Requests begun in one iteration of the event loop: a refusal takes about 30 us."""
SLICE_BYTES: Final = 4096
"""Bytes of pipelined messages or small chunks parsed in one iteration: at most a millisecond."""
LINES_AT_ONCE: Final = 256
"""A read with fewer lines is parsed at once: the parser's cost grows with the lines."""
LINGER_S: Final = 1.0
"""How long the bytes of a refused client are read and dropped. It may still be sending, and closing
at once would reset the connection, perhaps before the client has read the refusal."""
DRAIN_IDLE_S: Final = 0.5
"""While draining, an idle connection stays open this long: a request may be on its way."""
STILL_S: Final = 10.0
"""A request or reply whose client moves no byte for so long may be cut to make room for others.
Mobile networks stand still for seconds."""
SILENT: Final = 100.0
"""A second in which a connection that has asked nothing yet stays silent counts as so many of one
that waits between two requests: a flood of silent ones displaces itself, not the clients."""
AT_WORK: Final = -1.0
_NOTHING: Final = bytes(4)
_now: Final = perf_counter
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """See the module's docstring."""

    def __init__(self, context: RelayContext, forget: Callable[[ClientConnection], None]) -> None:
        """forget: called once, when the connection is gone."""
        self._context = context
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(max_body_bytes=context.proxy.max_body_bytes)
        self._flight: Flight | None = None
        self._early = EarlyBytes()
        self._reading_paused = self._writing_paused = False
        self._pumping = self._closing = self._draining = False
        self._asked = False
        """A request has come."""
        self._yielded = False
        """The next iteration of the event loop goes on with this connection."""
        self._watch = BodyWatch(context)
        self._since = _now()
        """When the connection became idle, or when the incoming request began."""
        self._progress = self._since
        """When a byte last moved in the direction the connection waits for."""
        self._unsent_bytes = 0
        self.address = ""
        """The client's IP address."""

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        no_delay(self._transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) and peer else ""

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        nothing_waits = self._flight is None and not self._early.size
        nothing_waits = nothing_waits and not self._writing_paused and not self._yielded
        if nothing_waits and (len(data) <= SLICE_BYTES or self._is_cheap(data)):  # nearly always
            self._feed(data)
            self._pump()
            return
        self._early.add(data)
        self._pump()
        if self._early.size > MAX_EARLY_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._open_transport().pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._transport = None
        self._let_go_of_body()
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.client_left()
        self._forget(self)

    def pause_writing(self) -> None:
        self._writing_paused = True
        self._progress = _now()
        self._unsent_bytes = 0
        if self._flight is not None:
            self._flight.pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._progress = _now()
        if self._flight is not None:
            self._flight.resume()
        else:
            self._yield()  # this iteration may have begun its share of requests

    # -- for the flight

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def reply_done(self, *, keep_alive: bool, at: float) -> None:
        self._flight = None
        self._since = at
        self._watch.give_back()
        if not keep_alive:
            self._close()
            return
        if self._draining:  # the reply allowed keep-alive, so another request may be on its way
            self._loop.call_later(DRAIN_IDLE_S, self._close_if_idle)
        self._pump()

    def reply_broken(self) -> None:
        self._flight = None
        self._watch.give_back()
        self._close()

    # -- for the server

    def drain(self) -> None:
        """Finish the request in flight, or the one on its way, then close."""
        if self._draining:
            return
        self._draining = True
        if self._flight is None:
            self._loop.call_later(DRAIN_IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._flight is None and not self._parser.begun and not self._yielded:
            self._close()

    def idle_s(self, now: float) -> float:
        """Return for how long nothing happens, in seconds that are comparable over connections;
        `AT_WORK` while a request is answered or comes in. now: `time.perf_counter()`."""
        if self._transport is None or self._yielded or self._early.size:
            return AT_WORK
        since = self._since if self._closing else self._progress
        if self._closing or self._writing_paused or self._parser.body_bytes:
            return now - since if now - since > STILL_S else AT_WORK
        if self._flight is not None:
            return AT_WORK
        return (now - self._since) * (1.0 if self._asked else SILENT)

    def make_room(self) -> bool:
        """Close this connection, which is idle. Returns: False if bytes of its client have come
        that were not read yet."""
        sock = self._open_transport().get_extra_info("socket")
        if fcntl.ioctl(sock.fileno(), termios.FIONREAD, _NOTHING) != _NOTHING:
            return False
        self._closing, self._since = True, _now()
        self.abort()
        return True

    def tick(self, now: float) -> None:
        """Enforce the timeouts; called periodically. now: `time.perf_counter()`."""
        proxy = self._context.proxy
        if self._writing_paused and self._transport is not None:
            unsent = self._transport.get_write_buffer_size()
            if unsent != self._unsent_bytes:
                self._unsent_bytes, self._progress = unsent, now
            elif now - self._progress > proxy.write_timeout_s:
                self._context.metrics.clients_cut.inc(("not_reading",))
                self.abort()
        elif self._flight is not None:
            self._flight.tick(now)
        elif self._closing:
            # The client may never read the rest, and `close` would wait for ever until it does.
            if now - self._since > proxy.write_timeout_s:
                self._context.metrics.clients_cut.inc(("not_reading",))
                self.abort()
        elif self._yielded:
            return
        elif not self._parser.begun:
            if now - self._since > proxy.idle_timeout_s:
                self._close()
        elif self._is_late(now):
            self._context.metrics.clients_cut.inc(("too_slow",))
            self._refuse(too_slow(), head_only=False, keep_alive=False)

    def _is_late(self, now: float) -> bool:
        """The incoming request has exceeded its timeout."""
        if self._parser.in_body:
            return self._watch.is_late(now)
        return now - self._since > self._context.proxy.head_timeout_s

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- requests

    def _pump(self) -> None:
        """Begin requests until one is in flight, none is left, or this iteration has begun enough:
        refusals are answered at once, and a client may pipeline thousands of them."""
        if self._pumping or self._yielded:
            return
        self._pumping = True
        try:
            begun, parsed = 0, False
            while self._flight is None and not self._closing and not self._writing_paused:
                if self._parser.ready:
                    if begun == REQUESTS_AT_ONCE:
                        self._yield()
                        break
                    begun += 1
                    self._begin(self._parser.ready.popleft())
                elif not self._body_may_go_on() or not self._early.size:
                    break
                elif parsed:
                    self._yield()
                    break
                else:
                    parsed = self._parse_early()
        finally:
            self._pumping = False

    def _yield(self) -> None:
        if not self._yielded:
            self._yielded = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._yielded = False
        self._pump()

    # -- a body that is coming in

    def _body_may_go_on(self) -> bool:
        """Check the incoming body. Returns: False when the request was refused."""
        parser = self._parser
        head = parser.head
        if head is None:
            return True
        refusal = self._watch.check(parser, head, _now())
        if refusal is not None:
            self._refuse(refusal, head_only=head.head_only, keep_alive=False)
            return False
        if parser.wants_continue:
            parser.wants_continue = False
            self.write(CONTINUE)
        return True

    def _let_go_of_body(self) -> None:
        """Free the body: it will not be answered, however long the client stays connected."""
        self._watch.give_back()
        self._early.clear()
        self._parser.drop_body()

    # -- what is parsed

    def _is_cheap(self, data: bytes) -> bool:
        """True if parsing `data` takes no longer than one iteration of the loop may."""
        parser = self._parser
        if parser.announced - parser.body_bytes >= len(data):
            return True
        return data.count(b"\n") <= LINES_AT_ONCE

    def _parse_early(self) -> bool:
        """Parse pipelined bytes: the rest of one body, or one slice. Returns: True if that may have
        taken as long as one iteration of the loop may."""
        of_body = self._parser.announced - self._parser.body_bytes
        data = self._early.take(max(SLICE_BYTES, of_body))
        if not self._early.size:
            self._resume_reading()
        self._feed(data)
        return of_body < SLICE_BYTES

    def _feed(self, data: bytes) -> None:
        parser = self._parser
        self._progress = now = _now()
        if not parser.begun:
            self._since = now
        parser.feed(data)

    def _begin(self, item: ClientRequest | Refusal) -> None:
        admitted = self._watch.admitted()
        self._asked = True
        if isinstance(item, Refusal):
            self._refuse(item, head_only=False, keep_alive=False)
            return
        head = item.head
        refusal = self._watch.whole(head, len(item.body))
        if refusal is not None:
            self._refuse(refusal, head_only=head.head_only, keep_alive=head.keep_alive)
            return
        began = self._progress if self._progress > self._since else self._since
        flight = receive(
            self._context,
            self,
            item,
            admitted=admitted,
            keep_alive=not self._draining,
            began=began,
        )
        if isinstance(flight, Refusal):
            self._refuse(flight, head_only=head.head_only, keep_alive=head.keep_alive)
            return
        self._flight = flight
        flight.start()

    def _refuse(self, refusal: Refusal, *, head_only: bool, keep_alive: bool) -> None:
        self._context.accounts.request(refusal.status)
        close = refusal.close or not keep_alive or self._draining
        self.write(refusal_reply(refusal, close=close, head_only=head_only))
        self._since = _now()
        if close:
            self._let_go_of_body()
        else:
            self._watch.give_back()
        if refusal.close:
            self._linger()
        elif close:
            self._close()

    # -- ends

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._open_transport().resume_reading()

    def _linger(self) -> None:
        self._closing = True
        transport = self._transport
        if transport is None:
            return
        self._resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._loop.call_later(LINGER_S, transport.close)

    def _close(self) -> None:
        self._closing = True
        self._since = _now()
        if self._transport is not None:
            self._transport.close()

    def _open_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "called between connection_made and connection_lost"
        return self._transport
