"""What the proxy counts, for Prometheus. One object, with its own registry, passed down.

Those that the relay's thread counts are cheap and have that one writer (`sidecar.metrics.hot`);
those made with `threads=True` may be counted from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from sidecar.metrics.hot import LabelledCounter, MetricSet
from sidecar.metrics.table import MetricTable

OVERHEAD_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)
LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """All metrics of one proxy process.

    table: this process's numbers; None keeps them where no other process sees them.
    others: the regions of the processes whose numbers are shown together with these.
    """

    def __init__(self, table: MetricTable | None = None, others: Sequence[memoryview] = ()) -> None:
        self.registry = CollectorRegistry()
        make = MetricSet(self.registry, table or MetricTable(), others)
        self.requests = make.labelled_counter(
            "sidecar_requests", "Requests by reply status.", ["status"]
        )
        self.ttft = make.histogram(
            "sidecar_ttft_seconds",
            "From the request's last byte to the first byte of the reply's body.",
            bounds=LATENCY_BUCKETS_S,
        )
        self.duration = make.histogram(
            "sidecar_request_duration_seconds",
            "From the request's last byte to the reply's last.",
            bounds=LATENCY_BUCKETS_S,
        )
        self.overhead = make.histogram(
            "sidecar_proxy_overhead_seconds",
            "Time of a request that was not spent waiting for vLLM or for the client.",
            bounds=OVERHEAD_BUCKETS_S,
        )
        self.event_loop_lag = make.histogram(
            "sidecar_event_loop_lag_seconds",
            "How late a timer of the relay's loop fires: what a new request waits unseen.",
            bounds=LAG_BUCKETS_S,
        )
        self.in_flight = make.gauge(
            "sidecar_requests_in_flight", "Requests between first and last byte."
        )
        self.streams_open = make.gauge(
            "sidecar_streams_open", "Replies that are being streamed to clients."
        )
        self.exchanges = make.labelled_counter(
            "sidecar_exchanges", "Model requests by how they ended.", ["outcome"]
        )
        self.adapter_replies = make.labelled_counter(
            "sidecar_adapter_replies",
            "Model requests by the adapter that answered.",
            ["adapter", "arm"],
        )
        self.clients_cut = make.labelled_counter(
            "sidecar_clients_cut",
            "Client connections that were ended by the relay before their time.",
            ["reason"],
        )
        self.request_body_bytes = make.gauge(
            "sidecar_request_body_bytes", "Bytes that long request bodies hold in memory."
        )
        self.bodies_refused = make.labelled_counter(
            "sidecar_bodies_refused",
            "Requests answered 503 because request bodies hold all the memory that they may.",
            ["reason"],
        )
        self.bodies_unreadable = make.labelled_counter(
            "sidecar_bodies_unreadable",
            "Requests that were answered with 400 because their body cannot be read.",
            ["reason"],
        )
        self._upstreams(make)
        self._capture(make)
        self._routing(make)
        self._workers(make)
        self._access(make)
        self._best_of(make)
        self._breaker(make)

    def _upstreams(self, make: MetricSet) -> None:
        self.upstream_retries = make.counter(
            "sidecar_upstream_retries",
            "Requests sent again because a kept connection was found dead.",
        )
        self.upstream_failovers = make.counter(
            "sidecar_upstream_failovers",
            "Requests sent to another vLLM because the first could not be reached.",
        )
        self.replica_ejections = make.labelled_counter(
            "sidecar_replica_ejections",
            "Times that a vLLM was left alone for a while because requests to it failed.",
            ["replica"],
        )
        self.adapter_missing = make.labelled_counter(
            "sidecar_adapter_missing",
            "Requests that vLLM refused because it does not know the adapter.",
            ["adapter"],
        )
        self.replica_up = make.labelled_gauge(
            "sidecar_replica_up",
            "1: every worker finds this vLLM healthy and sends to it.",
            ["replica"],
            merge="min",
        )
        self.replica_in_flight = make.labelled_gauge(
            "sidecar_replica_in_flight", "Requests that this vLLM is answering now.", ["replica"]
        )

    def _capture(self, make: MetricSet) -> None:
        self.captures_kept = make.counter(
            "sidecar_captures_kept", "Exchanges written to the bus.", threads=True
        )
        self.captures_lost = make.labelled_counter(
            "sidecar_captures_lost",
            "Exchanges that should have been kept and were not.",
            ["reason"],
            threads=True,
        )
        self.captures_skipped = make.labelled_counter(
            "sidecar_captures_skipped",
            "Exchanges that were not to be kept.",
            ["reason"],
        )
        self.outbox_rows_gone = make.counter(
            "sidecar_outbox_rows_gone",
            "Exchanges that were kept and went, unread, with an outbox that was deleted.",
            threads=True,
        )
        self.untrainable = make.labelled_counter(
            "sidecar_exchanges_untrainable",
            "Exchanges kept that must not be learned from.",
            ["reason"],
            threads=True,
        )
        self.model_mismatch = make.counter(
            "sidecar_model_mismatch",
            "Replies that name another model than was asked for. Alarm on any.",
            threads=True,
        )
        self.capture_pending_bytes = make.gauge(
            "sidecar_capture_pending_bytes", "Captured bytes in memory."
        )

    def _routing(self, make: MetricSet) -> None:
        self.routing_generation = make.gauge(
            "sidecar_routing_generation",
            "Generation of the table obeyed now; of several workers, the one furthest behind.",
            merge="min",
        )
        self.routing_failures = make.labelled_counter(
            "sidecar_routing_failures",
            "Looks at the routing table that failed; the last table stays.",
            ["reason"],
            threads=True,
        )

    def _workers(self, make: MetricSet) -> None:
        self.workers_alive = make.gauge("sidecar_workers_alive", "Proxy processes that serve.")
        self.worker_restarts = worker_restarts(make)

    def _access(self, make: MetricSet) -> None:
        self.access_denied = make.labelled_counter(
            "sidecar_access_denied",
            "Requests turned away because of their key or its limits.",
            ["reason"],
        )
        self.api_keys = make.gauge(
            "sidecar_api_keys", "API keys known and not revoked.", merge="min"
        )
        self.api_key_failures = make.labelled_counter(
            "sidecar_api_key_failures",
            "Looks at the API keys that failed, and keys that could not be read.",
            ["reason"],
            threads=True,
        )
        self.limits_unchecked = make.labelled_counter(
            "sidecar_limits_unchecked",
            "Requests and charges that the shared limits could not decide; memory did.",
            ["reason"],
            threads=True,
        )
        self.limits_lost = make.labelled_counter(
            "sidecar_limits_lost",
            "Counts of limits that were lost: of one key, or of all of them.",
            ["reason"],
            threads=True,
        )

    def _breaker(self, make: MetricSet) -> None:
        self.bad_replies = make.labelled_counter(
            "sidecar_bad_replies",
            "Replies during a canary that the breaker counts as bad, by arm and kind.",
            ["arm", "kind"],
        )
        self.breaker_trips = make.labelled_counter(
            "sidecar_breaker_trips", "Canaries that the breaker took out.", ["kind"]
        )
        self.breaker_open = make.gauge(
            "sidecar_breaker_open",
            "1: the breaker keeps the routing table's canary out on this worker.",
        )
        self.canary_fallbacks = make.counter(
            "sidecar_canary_fallbacks",
            "Requests that the champion answered because the canary failed before the first byte.",
        )

    def _best_of(self, make: MetricSet) -> None:
        self.best_of_requests = make.counter(
            "sidecar_best_of_requests", "Requests that asked for best of N."
        )
        self.best_of_picked = make.labelled_counter(
            "sidecar_best_of_picked", "Those answered by the judge's choice.", ["answer"]
        )
        self.best_of_fallbacks = make.labelled_counter(
            "sidecar_best_of_fallbacks",
            "Those answered by the first answer, or not at all.",
            ["reason"],
        )
        self.best_of_judge = make.histogram(
            "sidecar_best_of_judge_seconds",
            "Time that a best-of-N request waited for the judge, picked or not.",
            bounds=LATENCY_BUCKETS_S,
        )
        self.best_of_unreturned_tokens = make.counter(
            "sidecar_best_of_unreturned_tokens",
            "Tokens sampled for answers that were not returned.",
        )


def worker_restarts(make: MetricSet) -> LabelledCounter:
    """The one that the parent of several workers counts."""
    return make.labelled_counter(
        "sidecar_worker_restarts",
        "Proxy processes that ended unasked and were started again.",
        ["reason"],
    )
