"""The relay's side towards a client: one protocol object per connection.

Requests are answered one at a time and in order. While one is in flight the connection goes on
reading, because that is how it learns that the client has left; what comes early waits unparsed,
and when too much comes early, reading stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final, cast

from sidecar.relay.client_request import ClientRequest
from sidecar.relay.context import RelayContext
from sidecar.relay.direct_write import Outlet
from sidecar.relay.flight import Flight
from sidecar.relay.long_body import LongBody, LongBodyReader
from sidecar.relay.reception import receive, turn_away
from sidecar.relay.refusals import Refusal, refusal_reply, too_slow
from sidecar.relay.request_parser import RequestParser
from sidecar.relay.upstream import no_delay

MAX_EARLY_BYTES: Final = 64 * 1024
"""Pipelined bytes that wait for the request in flight."""
MAX_STRANGERS_BYTES: Final = 64 * 1024
"""Of a body that come before its sender is looked at. Under it nobody sees a difference: the
refusal comes when the body is whole, and the connection stays."""
LINGER_S: Final = 1.0
"""A refused client may still be sending; closing at once would reset the connection and could take
the refusal with it. So we read on and throw away for this long."""
DRAIN_IDLE_S: Final = 0.5
"""While draining, an idle connection is kept this long: its client may just be sending."""
MIN_BODY_BYTES_PER_S: Final = 1024
"""A body that comes slower than this, over `proxy.body_timeout_s` and more, is not waited for."""
_now: Final = perf_counter
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """One client's connection; see the module's docstring."""

    def __init__(self, context: RelayContext, forget: Callable[[ClientConnection], None]) -> None:
        """forget: called once, when the connection is gone."""
        self._context = context
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outlet: Outlet | None = None
        self._parser = RequestParser(max_body_bytes=context.proxy.max_body_bytes)
        self._flight: Flight | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._reading_paused = self._writing_paused = False
        self._pumping = self._closing = self._draining = False
        self._judged = False
        """Who sends the request whose body is coming in was looked at."""
        self._long: LongBody | None = None
        """A body that is read past the parser."""
        self._since = _now()
        """Since when it is idle, or the request that is coming in has been."""
        self._progress = self._since
        """When a byte last moved in the direction that is waited for."""
        self._unsent_bytes = 0

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        no_delay(self._transport)
        self._outlet = Outlet(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        nothing_waits = self._flight is None and self._long is None and not self._early
        if nothing_waits and not self._writing_paused:  # nearly always
            self._feed(data)
            self._pump()
            return
        self._early.append(data)
        self._early_bytes += len(data)
        self._pump()
        if self._early_bytes > MAX_EARLY_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._open_transport().pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._transport = self._outlet = None
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
        self._pump()

    # -- for the flight

    def write(self, data: bytes) -> None:
        if self._outlet is not None:
            self._outlet.write(data)

    def write_now(self, data: bytes) -> None:
        """`write` what nothing else is done after in this turn of the loop."""
        if self._outlet is not None:
            self._outlet.write_now(data)

    def reply_done(self, *, keep_alive: bool, at: float) -> None:
        self._flight = None
        self._since = at
        if not keep_alive:
            self._close()
            return
        if self._draining:  # the client was told that it may go on: its next request may be coming
            self._loop.call_later(DRAIN_IDLE_S, self._close_if_idle)
        self._pump()

    def reply_broken(self) -> None:
        self._flight = None
        self._close()

    # -- for the server

    def drain(self) -> None:
        """Finish what is in flight or on its way, then close."""
        if self._draining:
            return
        self._draining = True
        if self._flight is None:
            self._loop.call_later(DRAIN_IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._flight is None and not self._parser.begun:
            self._close()

    def tick(self, now: float) -> None:
        """Called now and then: end what has waited too long. now: `time.perf_counter()`."""
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
            # What is unsent may never be taken, and `close` waits for it for ever.
            if now - self._since > proxy.write_timeout_s:
                self._context.metrics.clients_cut.inc(("not_reading",))
                self.abort()
        elif not self._parser.begun:
            if now - self._since > proxy.idle_timeout_s:
                self._close()
        elif self._is_late(now):
            self._context.metrics.clients_cut.inc(("too_slow",))
            self._refuse(too_slow(), head_only=False, keep_alive=False)

    def _is_late(self, now: float) -> bool:
        """The request that is coming in is not worth waiting for."""
        proxy, waited_s = self._context.proxy, now - self._since
        if not self._parser.in_body:
            return waited_s > proxy.head_timeout_s
        allowed_s = proxy.body_timeout_s + self._parser.body_bytes / MIN_BODY_BYTES_PER_S
        return now - self._progress > proxy.body_timeout_s or waited_s > allowed_s

    def abort(self) -> None:
        if self._outlet is not None:
            self._outlet.abort()

    # -- requests

    def _pump(self) -> None:
        """Begin requests until one is in flight or nothing is left. Refusals are answered at
        once, so this is a loop: a client may pipeline thousands of them."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._flight is None and not self._closing and not self._writing_paused:
                if self._parser.ready:
                    self._begin(self._parser.ready.popleft())
                elif self._long is not None:
                    break
                elif self._early:
                    self._parse_early()
                else:
                    if self._parser.begun:
                        self._await_body()
                    break
        finally:
            self._pumping = False

    def _await_body(self) -> None:
        """A request is coming in. Who would be turned away is, before much of it is held here."""
        parser = self._parser
        head = parser.head
        if head is None:
            return
        if not self._judged:
            long = parser.body_bytes > MAX_STRANGERS_BYTES
            if parser.wants_continue:  # nobody looks again when it is here
                long = parser.may_bring_more_than(MAX_STRANGERS_BYTES)
            elif not long:
                return
            self._judged = True
            refusal = turn_away(self._context, head, long=long)
            if refusal is not None:
                self._refuse(refusal, head_only=head.head_only, keep_alive=False)
                return
            if parser.wants_continue:
                parser.wants_continue = False
                self.write(CONTINUE)
        self._long = body = parser.long_body()
        if body is not None:
            self._open_transport().set_protocol(LongBodyReader(self, body))

    def long_body_came(self, body: LongBody) -> None:
        self._parser.body_bytes = body.came
        self._progress = _now()
        if body.whole:
            self._open_transport().set_protocol(self)
            self._loop.call_soon(self._end_long_body)

    def _end_long_body(self) -> None:
        long, self._long = self._long, None
        if long is not None and not self._closing:
            self._parser.long_body_whole(long.take())
            self._pump()

    def _parse_early(self) -> None:
        data = b"".join(self._early) if len(self._early) > 1 else self._early[0]
        self._early.clear()
        self._early_bytes = 0
        if self._reading_paused:
            self._reading_paused = False
            self._open_transport().resume_reading()
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        parser = self._parser
        self._progress = now = _now()
        was_in_head = parser.begun and not parser.in_body
        if not parser.begun:
            self._since = now
        parser.feed(data)
        if was_in_head and parser.in_body:
            self._since = now  # the body has a time of its own

    def _begin(self, item: ClientRequest | Refusal) -> None:
        self._judged = False
        if isinstance(item, Refusal):
            self._refuse(item, head_only=False, keep_alive=False)
            return
        began = self._progress if self._progress > self._since else self._since
        flight = receive(self._context, self, item, keep_alive=not self._draining, began=began)
        if isinstance(flight, Refusal):
            head = item.head
            self._refuse(flight, head_only=head.head_only, keep_alive=head.keep_alive)
            return
        self._flight = flight
        flight.start()

    def _refuse(self, refusal: Refusal, *, head_only: bool, keep_alive: bool) -> None:
        self._context.accounts.request(refusal.status)
        close = refusal.close or not keep_alive or self._draining
        self.write(refusal_reply(refusal, close=close, head_only=head_only))
        self._since = _now()
        if refusal.close:
            self._linger()
        elif close:
            self._close()

    # -- ends

    def _linger(self) -> None:
        self._closing = True
        outlet = self._outlet
        if outlet is None:
            return
        if self._long is not None:
            self._long = None
            self._open_transport().set_protocol(self)
        outlet.end()
        self._loop.call_later(LINGER_S, outlet.close)

    def _close(self) -> None:
        self._closing = True
        self._since = _now()
        if self._outlet is not None:
            self._outlet.close()

    def _open_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "called between connection_made and connection_lost"
        return self._transport
