"""The objects that one relay shares between its connections; made once in `proxy.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from sidecar.access.admission import Access
from sidecar.capture.exchange_id import ExchangeIds
from sidecar.capture.recorder import Capture
from sidecar.metrics.proxy import Metrics
from sidecar.relay.flight.accounts import Accounts
from sidecar.relay.flight.held_bodies import BodyBudget
from sidecar.relay.flight.rate_limited_log import RateLimitedLog
from sidecar.relay.upstream.replicas import Replica, Replicas
from sidecar.routing.assignment import CompiledRouting
from sidecar.routing.breaker import Breaker
from sidecar.routing.session_key import KnownSessions
from sidecar.routing.table import RoutingTable
from sidecar.scoring.client import Picker
from sidecar.settings import BestOf, Proxy


class Routing(Protocol):
    """Where the relay reads the routing table: an attribute, never a query."""

    @property
    def table(self) -> RoutingTable: ...


class Answering:
    """One line of adapters, as the relay follows it: its routing table, prepared, and its
    breaker."""

    __slots__ = ("_compiled", "_models_changed", "_without_canary", "guard", "routing")

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
        """Return the routing table that is in force now."""
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


class SamplingRule(Protocol):
    """Decides whether a request is captured."""

    def skip_reason(self, *, surface: str, project: str, header: str) -> str | None: ...


@dataclass(kw_only=True)
class RelayContext:
    proxy: Proxy
    replicas: Replicas
    app: Replica
    routing: Routing
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
    breaker: Breaker | None = None
    """None: the relay makes one that is not shared with other processes."""
    slow_first_byte_s: float = 10.0
    """A reply whose first byte comes later than this counts as slow in the breaker."""
    own_lines: Mapping[str, tuple[Routing, Breaker]] = field(default_factory=dict)
    """Project -> where its own adapters are read, and their breaker; other projects have `routing`
    and `breaker`."""
    sessions: KnownSessions = field(default_factory=KnownSessions)

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.metrics)
        guard = self.breaker or Breaker(self.metrics)
        self._default = Answering(self.routing, guard, self.models_changed)
        self._own: dict[str, Answering] = {
            project: Answering(routing, breaker, self.models_changed)
            for project, (routing, breaker) in self.own_lines.items()
        }
        self.bodies = BodyBudget(self.proxy.max_held_body_bytes, self.metrics.request_body_bytes)
        self.traced = self.capture.traced
        self._max_in_flight = self.proxy.max_in_flight

    @property
    def busy(self) -> bool:
        """True if `proxy.max_in_flight` requests are in flight."""
        in_flight = 0
        for replica in self.replicas.all:
            in_flight += replica.in_flight
        return in_flight >= self._max_in_flight

    def compiled_routing(self, project: str) -> CompiledRouting:
        """The routing table that is in force now for the requests of a project."""
        return self._answering(project).compiled()

    def guard_of(self, project: str) -> Breaker:
        """The breaker of the canary that the requests of a project may get."""
        return self._answering(project).guard

    def _answering(self, project: str) -> Answering:
        if self._own:
            return self._own.get(project, self._default)
        return self._default
