"""The counters that every request increments, looked up once. For one thread."""

from __future__ import annotations

from typing import Final

from sidecar.metrics.hot import Counter, LabelledCounter
from sidecar.metrics.proxy import Metrics
from sidecar.records import Assignment, Outcome

CLIENT_LEFT: Final = "499"
"""The label, nginx's, for a client that left before the reply; this status is never sent."""

REMEMBERED: Final = 64
"""Assignments whose counter is cached: those of a few routing tables."""


class Accounts:
    """Counts requests and replies. Labels are few, and the counter of each is cached."""

    __slots__ = (
        "_adapters",
        "_captures_skipped",
        "_outcomes",
        "_skipped",
        "_statuses",
        "adapter_replies",
        "duration",
        "exchanges",
        "in_flight",
        "overhead",
        "requests",
        "streams_open",
        "ttft",
    )

    def __init__(self, metrics: Metrics) -> None:
        self.in_flight = metrics.in_flight
        self.streams_open = metrics.streams_open
        self.duration = metrics.duration
        self.overhead = metrics.overhead
        self.ttft = metrics.ttft
        self._captures_skipped = metrics.captures_skipped
        self.requests: LabelledCounter = metrics.requests
        self.exchanges: LabelledCounter = metrics.exchanges
        self.adapter_replies: LabelledCounter = metrics.adapter_replies
        self._statuses: dict[int, Counter] = {}
        self._outcomes: dict[str, Counter] = {}
        self._skipped: dict[str, Counter] = {}
        self._adapters: dict[int, tuple[Assignment, Counter]] = {}

    def request(self, status: int) -> None:
        """Count a request. status: 0 when the client left before the reply."""
        counter = self._statuses.get(status)
        if counter is None:
            label = str(status) if status else CLIENT_LEFT
            counter = self._statuses[status] = self.requests.labels(label)
        counter.inc()

    def exchange(self, outcome: Outcome, route: Assignment) -> None:
        """Count a model request that ended."""
        counter = self._outcomes.get(outcome)
        if counter is None:
            counter = self._outcomes[outcome] = self.exchanges.labels(outcome)
        counter.inc()
        # By identity: assignments are made with the routing table, not with each request.
        known = self._adapters.get(id(route))
        if known is None or known[0] is not route:
            if len(self._adapters) >= REMEMBERED:  # they belong to old routing tables
                self._adapters.clear()
            known = (route, self.adapter_replies.labels(route.adapter, route.arm))
            self._adapters[id(route)] = known
        known[1].inc()

    def skipped(self, reason: str) -> None:
        """Count an exchange that is not captured."""
        counter = self._skipped.get(reason)
        if counter is None:
            counter = self._skipped[reason] = self._captures_skipped.labels(reason)
        counter.inc()
