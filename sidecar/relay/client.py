"""A client connection: an asyncio protocol that reads requests and starts their flights.

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
from dataclasses import replace
from time import perf_counter
from typing import Final, cast

from sidecar.access.admission import ADAPTER, Admission
from sidecar.access.denials import Denial
from sidecar.records import Surface
from sidecar.relay.best_of import (
    BEST_OF_HEADER,
    BestOf,
    plan_best_of,
    refuse_surface,
    wanted_answers,
)
from sidecar.relay.context import FREE_BYTES, ClientRequest, RelayContext, RequestHead
from sidecar.relay.ending import FlightRecord
from sidecar.relay.flight import Flight
from sidecar.relay.plan import Plan, plan_request
from sidecar.relay.refusals import (
    Destination,
    Refusal,
    bodies_full,
    denied,
    no_such_path,
    refusal_reply,
    takes_no_body,
    too_busy,
    too_slow,
    unknown_adapter,
    with_limits,
)
from sidecar.relay.reply import ClientSide
from sidecar.relay.request_parser import EarlyBytes, RequestParser
from sidecar.relay.surfaces import SurfaceRule
from sidecar.relay.upstream import no_delay
from sidecar.routing.assignment import pinned_assignment, rehearsed

# Turn a received request into a flight, or refuse it.

CAPTURE_HEADER: Final = b"x-sidecar-capture"
OWN_PATHS: Final = b"/sidecar/"
"""Where the paths of the sidecar's own API begin that need a key."""
NOBODY: Final = Admission()
"""For the sidecar's own application, which needs no key."""


def admit(context: RelayContext, head: RequestHead) -> Admission | Refusal:
    """Check the caller's key and count the request against its limits, once, when its head is
    complete: a slowly sent body counts too."""
    if head.where is Destination.NOWHERE:
        return no_such_path(head.target)
    if not _asks_for_key(head):
        return NOBODY
    of_model = isinstance(head.where, SurfaceRule)
    answer = context.access.admit(head.credentials, context.clock(), of_model)
    return denied(answer, _surface(head.where)) if isinstance(answer, Denial) else answer


def no_room(context: RelayContext, head: RequestHead, reason: str, *, close: bool) -> Refusal:
    limit = context.bodies.limit
    context.metrics.bodies_refused.inc((reason,))
    context.rate_limited_log.warning("bodies_full", limit_bytes=limit, reason=reason)
    return replace(bodies_full(limit, _surface(head.where)), close=close)


def receive(
    context: RelayContext,
    client: ClientSide,
    request: ClientRequest,
    *,
    admitted: Admission | Refusal | None,
    keep_alive: bool,
    began: float,
) -> Flight | Refusal:
    """Create the flight of a complete request, or refuse it. admitted: what `admit` returned when
    the body came later than the head; None: not asked yet. began: when the last byte was here and
    no earlier request was in the way, by `time.perf_counter()`."""
    head = request.head
    where = head.where
    if isinstance(admitted, Refusal):
        return admitted
    if where is Destination.NOWHERE:
        return no_such_path(head.target)
    if where is not Destination.APP and context.busy:
        return too_busy(_surface(where))
    if admitted is None:
        admitted = admit(context, head)
    elif _asks_for_key(head):
        # The key may have been revoked or have expired while the body came in.
        denial = context.access.reject(head.credentials, context.clock())
        if denial is not None:
            return denied(denial, _surface(where))
    if isinstance(admitted, Refusal):
        return admitted
    if isinstance(where, SurfaceRule):
        return _receive_model_request(context, client, request, where, admitted, keep_alive, began)
    replica = context.app
    if where is Destination.VLLM:
        replica = context.replicas.least_loaded(context.monotonic())
    record = FlightRecord(
        context, request, plan=None, admission=admitted, began=began, replica=replica
    )
    return Flight(context, client, record, keep_alive=keep_alive)


def _asks_for_key(head: RequestHead) -> bool:
    return head.where is not Destination.APP or head.target.startswith((b"/v1/", OWN_PATHS))


def _surface(where: Destination | SurfaceRule) -> Surface:
    """The surface whose error format a refusal uses."""
    return where.surface if isinstance(where, SurfaceRule) else "chat"


def _receive_model_request(
    context: RelayContext,
    client: ClientSide,
    request: ClientRequest,
    rule: SurfaceRule,
    admission: Admission,
    keep_alive: bool,
    began: float,
) -> Flight | Refusal:
    head = request.head
    headers = head.headers
    routing = context.compiled_routing(admission.project)
    pinned = None
    if admission.rehearsed_by:
        pinned = rehearsed(routing.table, admission.rehearsed_by)
    elif ADAPTER in headers.aside:  # a caller without that right was rejected
        name = headers.text(ADAPTER)  # an adapter's, its version's (`v12`) or its role's
        loaded = frozenset().union(*(replica.models or () for replica in context.replicas.all))
        pinned = pinned_assignment(routing.table, name, loaded)
        if pinned is None:
            return unknown_adapter(name, rule.surface)
    skip_reason = None  # an attempt is always recorded: its tokens are counted there
    if not admission.rehearsed_by:
        skip_reason = context.sampling.skip_reason(
            surface=rule.surface,
            project=admission.project,
            header=headers.text(CAPTURE_HEADER),
        )
    allowance = admission.allowance
    plan = plan_request(
        rule,
        request.body,
        headers,
        routing,
        context.sessions,
        skip_reason=skip_reason,
        project=admission.project,
        key_id=admission.key_id,
        metered=allowance is not None and allowance.tokens_per_day is not None,
        needs_session=context.replicas.many or context.traced,
        pinned=pinned,
        operator=admission.operator,
        address=client.address,
    )
    if isinstance(plan, Refusal):
        if plan.reason:
            context.metrics.bodies_unreadable.inc((plan.reason,))
            context.rate_limited_log.warning(
                "body_unreadable", reason=plan.reason, surface=rule.surface
            )
        else:
            context.metrics.models_unknown.inc()
        return with_limits(plan, admission.headers)
    n = 1
    if BEST_OF_HEADER in headers.aside:
        asked = headers.text(BEST_OF_HEADER)
        if rule.surface == "chat":
            limit = admission.best_of_max if context.best_of.enabled else 1
            wanted = wanted_answers(asked, limit=limit)
        else:
            wanted = refuse_surface(asked, head.target, rule.surface) or 1
        if isinstance(wanted, Refusal):
            return with_limits(wanted, admission.headers)
        n = wanted
    record = FlightRecord(context, request, plan=plan, admission=admission, began=began)
    best_of = _best_of(context, plan, n, record) if n > 1 else None
    return Flight(context, client, record, keep_alive=keep_alive, best_of=best_of)


def _best_of(context: RelayContext, plan: Plan, n: int, record: FlightRecord) -> BestOf | None:
    """None: this process has no judge."""
    if context.picker is None:
        return None
    captured = plan.skip_reason is None
    return BestOf(
        plan_best_of(plan.peek, n, captured=captured),
        context.picker,
        context.metrics,
        exchange_id=record.exchange_id,
        request=plan.peek.body,
        keep=captured,
        project=record.admission.project,
        timeout_s=context.best_of.timeout_s,
    )


# Decide whether an incoming request body may go on. No IO.

MAX_UNAUTHENTICATED_BYTES: Final = 64 * 1024
"""Body bytes accepted before an unauthorised sender is refused. A shorter body is refused when it
is complete, and the connection stays open."""
IDLE_TIMEOUT_S = 75.0
"""An idle client connection is closed after this long, as nginx does by default."""
HEAD_TIMEOUT_S = 10.0
"""From a request's first byte to the end of its headers."""
BODY_TIMEOUT_S = 30.0
"""Longest stand-still of a request's body; what came faster before is credited for this long at
most."""
WRITE_TIMEOUT_S = 60.0
"""A client that takes nothing of its reply for this long is cut off."""
MIN_BODY_BYTES_PER_S: Final = 1024
"""A body that comes more slowly than this is refused. See `moved`."""


class BodyWatch:
    """The incoming body of one connection, and its share of the memory budget."""

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._admitted: Admission | Refusal | None = None
        """What `admit` returned; None: not called yet."""
        self._may_be_long = False
        """The sender was checked, so the body may exceed `MAX_UNAUTHENTICATED_BYTES`."""
        self._held_bytes = 0
        """Bytes of the worker's budget that the body holds, incoming or in flight."""
        self._due = 0.0
        """When the body is late, by `time.perf_counter()`; 0: none is coming."""
        self._seen = 0
        """Body bytes already counted in `_due`."""

    def check(self, parser: RequestParser, head: RequestHead, at: float) -> Refusal | None:
        """Returns: why the body may not go on; None: a client that waits for `100 Continue` may be
        told to send it. at: when its last bytes came."""
        came = parser.body_bytes
        self.moved(came, at)
        admitted, context = self._admitted, self._context
        if admitted is None:
            admitted = self._admitted = admit(context, head)
            length, held = parser.announced, self._held_bytes
            fits = length <= FREE_BYTES or context.bodies.fits(length - held, held)
            if not fits and not isinstance(admitted, Refusal):
                return no_room(context, head, "announced", close=True)
        if came <= MAX_UNAUTHENTICATED_BYTES and not parser.wants_continue:
            return None
        if not self._may_be_long:
            self._may_be_long = True
            if isinstance(admitted, Refusal):
                return replace(admitted, close=True)
            # A client that waits for 100 is judged by the announced length: no later check follows.
            most = MAX_UNAUTHENTICATED_BYTES
            if head.where is Destination.APP and (came > most or parser.may_bring_more_than(most)):
                return takes_no_body(head.target)
        return self.hold(came, head, "coming")

    def is_late(self, now: float) -> bool:
        return 0.0 < self._due < now

    def admitted(self) -> Admission | Refusal | None:
        """Return what `admit` returned for this request, and reset for the next one."""
        admitted, self._admitted = self._admitted, None
        self._may_be_long = False
        self._due, self._seen = 0.0, 0
        return admitted

    def give_back(self) -> None:
        if self._held_bytes:
            self._context.bodies.give_back(self._held_bytes)
            self._held_bytes = 0

    def moved(self, came: int, at: float) -> None:
        """Extend the deadline by the time that the new bytes may take, up to `BODY_TIMEOUT_S` from
        now: a body that began fast may not drip for hours."""
        latest = at + BODY_TIMEOUT_S
        earned = self._due + (came - self._seen) / MIN_BODY_BYTES_PER_S
        self._due = min(latest, earned) if self._due else latest
        self._seen = came

    def hold(self, count: int, head: RequestHead, reason: str) -> Refusal | None:
        """Reserve `count` bytes of the worker's budget for the body. Returns: why it may not be
        kept. reason: "coming", or "whole" for one that is kept until its reply is sent."""
        held = self._held_bytes
        if count <= FREE_BYTES or count <= held:
            return None
        if not self._context.bodies.take(count - held, held):
            return no_room(self._context, head, reason, close=reason != "whole")
        self._held_bytes = count
        return None


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
        if self._transport is None:
            return  # accepted, and not yet connected: a close now would close nothing
        if self._writing_paused:
            unsent = self._transport.get_write_buffer_size()
            if unsent != self._unsent_bytes:
                self._unsent_bytes, self._progress = unsent, now
            elif now - self._progress > WRITE_TIMEOUT_S:
                self._context.metrics.clients_cut.inc(("not_reading",))
                self.abort()
        elif self._flight is not None:
            self._flight.tick(now)
        elif self._closing:
            # The client may never read the rest, and `close` would wait for ever until it does.
            if now - self._since > WRITE_TIMEOUT_S:
                self._context.metrics.clients_cut.inc(("not_reading",))
                self.abort()
        elif self._yielded:
            return
        elif not self._parser.begun:
            if now - self._since > IDLE_TIMEOUT_S:
                self._close()
        elif (
            self._watch.is_late(now) if self._parser.in_body else now - self._since > HEAD_TIMEOUT_S
        ):
            self._context.metrics.clients_cut.inc(("too_slow",))
            self._refuse(too_slow(), head_only=False, keep_alive=False)

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
        """Parse the rest of one body, or one slice. Returns: True if that may have taken as long as
        one iteration of the loop may."""
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
        refusal = self._watch.hold(len(item.body), head, "whole")
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
