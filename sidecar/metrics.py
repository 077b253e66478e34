"""What the proxy counts, for Prometheus. One object, with its own registry, passed down."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OVERHEAD_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)
LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """All counters of one proxy process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "sidecar_requests", "Requests by reply status.", ["status"], registry=registry
        )
        self.ttft = Histogram(
            "sidecar_ttft_seconds",
            "From the request's last byte to the first byte of the reply's body.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "sidecar_request_duration_seconds",
            "From the request's last byte to the reply's last.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.overhead = Histogram(
            "sidecar_proxy_overhead_seconds",
            "Time of a request that was not spent waiting for vLLM or for the client.",
            buckets=OVERHEAD_BUCKETS_S,
            registry=registry,
        )
        self.in_flight = Gauge(
            "sidecar_requests_in_flight", "Requests between first and last byte.", registry=registry
        )
        self.exchanges = Counter(
            "sidecar_exchanges", "Chat requests by how they ended.", ["outcome"], registry=registry
        )
        self.adapter_replies = Counter(
            "sidecar_adapter_replies",
            "Chat requests by the adapter that answered.",
            ["adapter", "arm"],
            registry=registry,
        )
        self.upstream_retries = Counter(
            "sidecar_upstream_retries",
            "Requests sent again because a kept connection was found dead.",
            registry=registry,
        )
        self.adapter_missing = Counter(
            "sidecar_adapter_missing",
            "Requests that vLLM refused because it does not know the adapter.",
            ["adapter"],
            registry=registry,
        )
        self._capture(registry)
        self._routing(registry)

    def _capture(self, registry: CollectorRegistry) -> None:
        self.captures_kept = Counter(
            "sidecar_captures_kept", "Exchanges written to the bus.", registry=registry
        )
        self.captures_lost = Counter(
            "sidecar_captures_lost",
            "Exchanges that should have been kept and were not.",
            ["reason"],
            registry=registry,
        )
        self.captures_skipped = Counter(
            "sidecar_captures_skipped",
            "Exchanges that were not to be kept.",
            ["reason"],
            registry=registry,
        )
        self.untrainable = Counter(
            "sidecar_exchanges_untrainable",
            "Exchanges kept that must not be learned from.",
            ["reason"],
            registry=registry,
        )
        self.model_mismatch = Counter(
            "sidecar_model_mismatch",
            "Replies that name another model than was asked for. Alarm on any.",
            registry=registry,
        )
        self.capture_pending_bytes = Gauge(
            "sidecar_capture_pending_bytes", "Captured bytes in memory.", registry=registry
        )

    def _routing(self, registry: CollectorRegistry) -> None:
        self.routing_generation = Gauge(
            "sidecar_routing_generation", "Generation of the table obeyed now.", registry=registry
        )
        self.routing_failures = Counter(
            "sidecar_routing_failures",
            "Looks at the routing table that failed; the last table stays.",
            ["reason"],
            registry=registry,
        )
