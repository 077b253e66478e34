"""What one relay shares between its connections, and a request as the client sent it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Final, Protocol

from sidecar.access.admission import Access, Credentials, Keep
from sidecar.capture.exchange_id import ExchangeIds
from sidecar.capture.recorder import Capture
from sidecar.capture.sampling_rule import SamplingRule
from sidecar.logs import RateLimitedLog
from sidecar.metrics.hot import Gauge, LabelledCounter
from sidecar.metrics.proxy import Metrics
from sidecar.records import Assignment, Outcome
from sidecar.relay.heads import RequestHeaders
from sidecar.relay.refusals import Destination, destination
from sidecar.relay.replicas import Replica, Replicas
from sidecar.relay.surfaces import SurfaceRule
from sidecar.routing.assignment import CompiledRouting
from sidecar.routing.breaker import Breaker
from sidecar.routing.session_key import KnownSessions
from sidecar.routing.table import RoutingTable
from sidecar.scoring import Picker
from sidecar.settings import BestOf, Proxy

# The metrics that every request changes, looked up once. For one thread.

CLIENT_LEFT: Final = "499"
"""The label, nginx's, for a client that left before the reply; this status is never sent."""


class Accounts:
    """Counts requests and replies."""

    def __init__(self, metrics: Metrics) -> None:
        self.in_flight = metrics.in_flight
        self.streams_open = metrics.streams_open
        self.duration = metrics.duration
        self.overhead = metrics.overhead
        self.ttft = metrics.ttft
        self._captures_skipped: LabelledCounter = metrics.captures_skipped
        self._requests: LabelledCounter = metrics.requests
        self._exchanges: LabelledCounter = metrics.exchanges
        self._adapter_replies: LabelledCounter = metrics.adapter_replies

    def request(self, status: int) -> None:
        """Count a request. status: 0 when the client left before the reply."""
        self._requests.inc((str(status) if status else CLIENT_LEFT,))

    def exchange(self, outcome: Outcome, route: Assignment) -> None:
        self._exchanges.inc((outcome,))
        self._adapter_replies.inc((route.adapter, route.arm))

    def skipped(self, reason: str) -> None:
        self._captures_skipped.inc((reason,))


# Keep request bodies in little more memory than their length, and all of them within a limit.

FREE_BYTES: Final = 64 * 1024
"""A body up to this length is always accepted and never counted: the limit of connections bounds
their number, and stalled uploads then keep no ordinary request out."""
MAX_IN_FLIGHT = 2048  # model requests of one worker at once; a further one is answered 503
HELD_BODIES = 8
"""Longest bodies (`proxy.max_body_bytes`) whose bytes one worker holds, incoming or in flight."""


class BodyPieces:
    """The received part of one body, joined as it comes. A list would keep an object of 40 bytes
    for each piece, and a client may send pieces of one byte."""

    def __init__(self) -> None:
        self._first = b""
        self._rest: BytesIO | None = None

    def add(self, data: bytes) -> None:
        rest = self._rest
        if rest is not None:
            rest.write(data)
        elif not self._first:
            self._first = data
        else:
            self._rest = rest = BytesIO()
            rest.write(self._first)
            rest.write(data)
            self._first = b""

    def take(self) -> bytes:
        """Return all that came, and hold nothing."""
        rest, self._rest = self._rest, None
        if rest is not None:
            return rest.getvalue()  # the very memory, not a copy
        first, self._first = self._first, b""
        return first


class BodyBudget:
    """Counts the bytes that one worker holds for long bodies, incoming or in flight."""

    def __init__(self, limit: int, gauge: Gauge) -> None:
        self.limit = limit
        self.held = 0
        self._gauge = gauge

    def fits(self, more: int, own: int) -> bool:
        """True if there is room for `more` bytes. own: the bytes that this body holds already. One
        body alone always fits: `proxy.max_body_bytes` bounds it."""
        return self.held + more <= self.limit or self.held == own

    def take(self, more: int, own: int) -> bool:
        if not self.fits(more, own):
            return False
        self.held += more
        self._gauge.set(self.held)
        return True

    def give_back(self, count: int) -> None:
        self.held -= count
        self._gauge.set(self.held)


class Routing(Protocol):
    """Where the relay reads the routing table: an attribute, never a query."""

    @property
    def table(self) -> RoutingTable: ...


class Answering:
    """One line of adapters: its routing table, prepared, and its breaker."""

    def __init__(
        self, routing: Routing, guard: Breaker, models_changed: Callable[[], None]
    ) -> None:
        """models_changed: as in `RelayContext`."""
        self.routing = routing
        self.guard = guard
        self._models_changed = models_changed
        self._compiled: CompiledRouting | None = None
        self._without_canary: CompiledRouting | None = None

    def compiled(self) -> CompiledRouting:
        compiled, table = self._compiled, self.routing.table
        if compiled is None or compiled.table is not table:
            if compiled is not None:  # a replica may just have loaded the new adapter
                self._models_changed()
            compiled = self._compiled = CompiledRouting(table)
            self._without_canary = None
            self.guard.follow(table)
        if compiled.splits and self.guard.is_open:
            return self._champion_alone(table)
        return compiled

    def _champion_alone(self, table: RoutingTable) -> CompiledRouting:
        """The table without its canary, because the breaker is open."""
        without = self._without_canary
        if without is None:
            without = CompiledRouting(replace(table, canary=None, canary_weight_bp=0))
            self._without_canary = without
            self.guard.show_open()
        return without


@dataclass(kw_only=True)
class RelayContext:
    proxy: Proxy
    replicas: Replicas
    app: Replica
    routing: Routing
    breaker: Breaker
    capture: Capture
    metrics: Metrics
    rate_limited_log: RateLimitedLog
    sampling: SamplingRule
    access: Access
    best_of: BestOf = field(default_factory=BestOf)
    picker: Picker | None = None
    """Picks the best of N answers; None: best of N is off."""
    outgoing_trace: Callable[[bytes | None], bytes] | None = None
    """Maps the client's `traceparent` to the one for vLLM; None: it is passed on unchanged."""
    models_changed: Callable[[], None] = lambda: None
    """Called when a replica lacks a model that it was thought to have."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""
    monotonic: Callable[[], float] = time.monotonic
    ids: ExchangeIds = field(default_factory=lambda: ExchangeIds(os.urandom))
    slow_first_byte_s: float = 10.0
    """A reply whose first byte comes later than this counts as slow in the breaker."""
    own_lines: Mapping[str, tuple[Routing, Breaker]] = field(default_factory=dict)
    """Project -> where its own adapters are read, and their breaker; other projects have `routing`
    and `breaker`."""
    sessions: KnownSessions = field(default_factory=KnownSessions)

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.metrics)
        self._default = Answering(self.routing, self.breaker, self.models_changed)
        self._own: dict[str, Answering] = {
            project: Answering(routing, breaker, self.models_changed)
            for project, (routing, breaker) in self.own_lines.items()
        }
        most = HELD_BODIES * self.proxy.max_body_bytes
        self.bodies = BodyBudget(most, self.metrics.request_body_bytes)
        self.traced = self.capture.traced

    @property
    def busy(self) -> bool:
        return sum([replica.in_flight for replica in self.replicas.all]) >= MAX_IN_FLIGHT

    def compiled_routing(self, project: str) -> CompiledRouting:
        return self._own.get(project, self._default).compiled()

    def guard_of(self, project: str) -> Breaker:
        return self._own.get(project, self._default).guard


# One request as the client sent it.


class SentHead:
    """A head to send to one replica, up to the value of Content-Length; made of one client head."""

    def __init__(
        self, replica: Replica, instead: bytes | Keep | None, encoding: bool, up_to_length: bytes
    ) -> None:
        """instead: replaces the caller's credentials. encoding: the reply may be compressed."""
        self._replica = replica
        self._instead = instead
        self._encoding = encoding
        self.up_to_length = up_to_length

    def serves(self, replica: Replica, instead: bytes | Keep | None, encoding: bool) -> bool:
        """True if this head was made for these."""
        return replica is self._replica and instead is self._instead and encoding is self._encoding


class RequestHead:
    """Everything before the body. Immutable once complete, and shared by all requests of one
    connection whose heads have the same bytes. What follows from the head alone is cached here."""

    def __init__(
        self,
        method: bytes,
        target: bytes,
        headers: RequestHeaders,
        http_1_1: bool,
        keep_alive: bool,
    ) -> None:
        """keep_alive: the client wants to keep the connection open."""
        self.method = method
        self.target = target
        self.headers = headers
        self.http_1_1 = http_1_1
        self.keep_alive = keep_alive
        self.head_only = method == b"HEAD"
        """The reply has no body, even if its head has a Content-Length."""
        self.where: Destination | SurfaceRule = destination(method, target)
        self._credentials: Credentials | None = None
        self.sent: SentHead | None = None
        """The head that was last sent to a replica for this one."""

    @property
    def credentials(self) -> Credentials:
        found = self._credentials
        if found is None:
            found = self._credentials = Credentials(self.headers.aside)
        return found


class ClientRequest:
    """Immutable once complete. (A plain class, because one is made for every request.)"""

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body
