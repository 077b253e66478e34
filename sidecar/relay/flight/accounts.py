"""The counters that every request moves, looked up once. One thread."""

from __future__ import annotations

from typing import Final

from sidecar.metrics.hot import Counter, LabelledCounter
from sidecar.metrics.proxy import Metrics
from sidecar.records import Assignment, Outcome

CLIENT_LEFT: Final = "499"
"""nginx's number for it; no such status is ever sent."""

REMEMBERED: Final = 64
"""Assignments whose counter is at hand: of a few routing tables."""


class Accounts:
    """What is counted of requests and their replies. Labels are few, and each is kept at hand."""

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
        """One request was answered. status: 0 when the client left before."""
        counter = self._statuses.get(status)
        if counter is None:
            label = str(status) if status else CLIENT_LEFT
            counter = self._statuses[status] = self.requests.labels(label)
        counter.inc()

    def exchange(self, outcome: Outcome, route: Assignment) -> None:
        """One model request ended."""
        counter = self._outcomes.get(outcome)
        if counter is None:
            counter = self._outcomes[outcome] = self.exchanges.labels(outcome)
        counter.inc()
        # By identity: assignments are made with the routing table, not with each request.
        known = self._adapters.get(id(route))
        if known is None or known[0] is not route:
            if len(self._adapters) >= REMEMBERED:  # of tables that are gone
                self._adapters.clear()
            known = (route, self.adapter_replies.labels(route.adapter, route.arm))
            self._adapters[id(route)] = known
        known[1].inc()

    def skipped(self, reason: str) -> None:
        """A capture that was not to be."""
        counter = self._skipped.get(reason)
        if counter is None:
            counter = self._skipped[reason] = self._captures_skipped.labels(reason)
        counter.inc()
