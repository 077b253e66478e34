"""The relay's side towards a client: one protocol object per connection.

Requests are answered one at a time and in order. While one is in flight the connection goes on
reading, because that is how it learns that the client has left; what comes early waits unparsed,
and when too much comes early, reading stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from sidecar.relay.client_request import ClientRequest
from sidecar.relay.context import RelayContext
from sidecar.relay.flight import Flight
from sidecar.relay.paths import Destination, destination
from sidecar.relay.plan import plan_chat
from sidecar.relay.refusals import Refusal, not_found, refusal_reply, too_slow
from sidecar.relay.request_parser import RequestParser
from sidecar.relay.upstream import no_delay

MAX_EARLY_BYTES = 64 * 1024
"""Pipelined bytes that wait for the request in flight."""
LINGER_S = 1.0
"""A refused client may still be sending; closing at once would reset the connection and could take
the refusal with it. So we read on and throw away for this long."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """One client's connection; see the module's docstring."""

    def __init__(self, context: RelayContext, forget: Callable[[ClientConnection], None]) -> None:
        """forget: called once, when the connection is gone."""
        self._context = context
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(max_body_bytes=context.proxy.max_body_bytes)
        self._flight: Flight | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._reading_paused = self._writing_paused = False
        self._pumping = self._closing = self._draining = False
        self._waiting_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        no_delay(self._transport)
        self._arm_timer()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._early.append(data)
        self._early_bytes += len(data)
        self._pump()
        if self._early_bytes > MAX_EARLY_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._open_transport().pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.client_left()
        self._forget(self)

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._flight is not None:
            self._flight.pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._flight is not None:
            self._flight.resume()
        self._pump()

    # -- for the flight (ClientSide)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def reply_done(self, *, keep_alive: bool) -> None:
        self._flight = None
        self._waiting_since = self._loop.time()
        if keep_alive and not self._draining:
            self._pump()
        else:
            self._close()

    def reply_broken(self) -> None:
        self._flight = None
        self._close()

    # -- for the server

    def drain(self) -> None:
        """Finish what is in flight, then close; close at once when nothing is."""
        self._draining = True
        if self._flight is None:
            self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

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
                elif self._early:
                    self._parse_early()
                else:
                    break
        finally:
            self._pumping = False

    def _parse_early(self) -> None:
        data = b"".join(self._early) if len(self._early) > 1 else self._early[0]
        self._early.clear()
        self._early_bytes = 0
        if self._reading_paused:
            self._reading_paused = False
            self._open_transport().resume_reading()
        self._parser.feed(data)
        if self._parser.in_body:
            self._waiting_since = self._loop.time()  # a body may take long, but never stand still
        if self._parser.wants_continue and not self._parser.ready:
            self._parser.wants_continue = False
            self.write(CONTINUE)

    def _begin(self, item: ClientRequest | Refusal) -> None:
        if isinstance(item, Refusal):
            self._refuse(item, head_only=False, keep_alive=False)
            return
        where = destination(item.method, item.target)
        if where is Destination.CHAT:
            self._begin_chat(item)
        elif where is Destination.NOWHERE:
            head_only = item.method == b"HEAD"
            self._refuse(not_found(), head_only=head_only, keep_alive=item.keep_alive)
        else:
            pool = self._context.app if where is Destination.APP else self._context.vllm
            self._fly(Flight(self._context, self, item, upstream=pool, plan=None))

    def _begin_chat(self, item: ClientRequest) -> None:
        context = self._context
        sampled = context.sample_rate >= 1.0 or context.chance() < context.sample_rate
        plan = plan_chat(item.body, item.headers, context.routing.table, sampled=sampled)
        if isinstance(plan, Refusal):
            self._refuse(plan, head_only=False, keep_alive=item.keep_alive)
            return
        self._fly(Flight(context, self, item, upstream=context.vllm, plan=plan))

    def _fly(self, flight: Flight) -> None:
        self._flight = flight
        flight.start()

    def _refuse(self, refusal: Refusal, *, head_only: bool, keep_alive: bool) -> None:
        self._context.metrics.requests.labels(str(refusal.status)).inc()
        close = refusal.close or not keep_alive or self._draining
        self.write(refusal_reply(refusal, close=close, head_only=head_only))
        self._waiting_since = self._loop.time()
        if refusal.close:
            self._linger()
        elif close:
            self._close()

    # -- ends

    def _linger(self) -> None:
        self._closing = True
        transport = self._transport
        if transport is None:
            return
        if transport.can_write_eof():
            transport.write_eof()
        self._loop.call_later(LINGER_S, transport.close)

    def _close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def _open_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "called between connection_made and connection_lost"
        return self._transport

    def _arm_timer(self) -> None:
        limit_s = self._context.proxy.idle_timeout_s
        left_s = self._waiting_since + limit_s - self._loop.time()
        if self._flight is not None:
            left_s = limit_s
        self._timer = self._loop.call_later(max(left_s, 0.0), self._timer_fired)

    def _timer_fired(self) -> None:
        waited_s = self._loop.time() - self._waiting_since
        if self._flight is not None or waited_s < self._context.proxy.idle_timeout_s:
            self._arm_timer()
        elif self._parser.begun and not self._closing:
            self._refuse(too_slow(), head_only=False, keep_alive=False)
        else:
            self._close()
