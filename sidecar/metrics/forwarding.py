"""Metrics of the forwarding process, counted by the process that started it.

That is the proxy, or the parent of several workers; its workers expose the parent's numbers.
"""

from __future__ import annotations

from sidecar.metrics.hot import MetricSet


class ForwardingMetrics:
    """What is forwarded to Kafka. All stay 0 with the embedded bus."""

    def __init__(self, make: MetricSet) -> None:
        self.forwarded = make.counter(
            "sidecar_forwarded", "Exchanges that Kafka has acknowledged to this proxy."
        )
        self.waiting = make.gauge(
            "sidecar_forward_waiting", "Exchanges in the outbox that wait for Kafka."
        )
        self.reachable = make.gauge(
            "sidecar_forward_reachable", "1 if the last attempt to reach Kafka succeeded."
        )
        self.failures = make.labelled_counter(
            "sidecar_forward_failures",
            "Attempts to forward that failed and are made again, by reason.",
            ["reason"],
        )
        self.set_aside = make.labelled_counter(
            "sidecar_forward_set_aside",
            "Exchanges that the topic cannot hold, kept in dead-letters.db, by reason.",
            ["reason"],
        )
        self.expired = make.counter(
            "sidecar_forward_expired",
            "Exchanges deleted from dead-letters.db because of their age.",
        )
        self.restarts = make.counter(
            "sidecar_forward_restarts", "Times that the forwarding process ended unasked."
        )
