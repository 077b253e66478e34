"""What one relay works with, put together once in `server.py` and handed to every connection."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sidecar.capture import Capture
from sidecar.metrics import Metrics
from sidecar.relay.rare_log import RareLog
from sidecar.relay.upstream import UpstreamPool
from sidecar.routing import RoutingTable
from sidecar.settings import Proxy


class Routing(Protocol):
    """Where the relay reads the routing table: an attribute, never a query."""

    @property
    def table(self) -> RoutingTable: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayContext:
    proxy: Proxy
    sample_rate: float
    vllm: UpstreamPool
    app: UpstreamPool
    routing: Routing
    capture: Capture
    metrics: Metrics
    rare_log: RareLog
    clock: Callable[[], float] = time.time
    """Unix seconds."""
    randomness: Callable[[int], bytes] = os.urandom
    chance: Callable[[], float] = random.random
    """Uniform in 0..1, for `capture.sample_rate`."""
