"""The proxy's Prometheus metrics: one object with its own registry, passed to whoever counts.

Metrics without `threads=True` are updated by the relay's thread only (`sidecar.metrics.hot`).
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from sidecar.metrics.families import MetricTable
from sidecar.metrics.hot import LabelledCounter, MetricSet

# Metrics of the forwarding process, counted by the process that started it.


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


OVERHEAD_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)
LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """All metrics of one proxy process.

    table: where this process keeps its numbers; None for private memory.
    others: memory regions of the other processes, exposed together with this one's.
    """

    def __init__(self, table: MetricTable | None = None, others: Sequence[memoryview] = ()) -> None:
        self.registry = CollectorRegistry()
        make = MetricSet(self.registry, table or MetricTable(), others)
        self.requests = make.labelled_counter(
            "sidecar_requests", "Requests by reply status.", ["status"]
        )
        self.ttft = make.histogram(
            "sidecar_ttft_seconds",
            "Time from the request's last byte to the first byte of the reply's body.",
            bounds=LATENCY_BUCKETS_S,
        )
        self.duration = make.histogram(
            "sidecar_request_duration_seconds",
            "Time from the request's last byte to the reply's last byte.",
            bounds=LATENCY_BUCKETS_S,
        )
        self.overhead = make.histogram(
            "sidecar_proxy_overhead_seconds",
            "Time a request spent in the proxy, without waits for vLLM and the client.",
            bounds=OVERHEAD_BUCKETS_S,
        )
        self.event_loop_lag = make.histogram(
            "sidecar_event_loop_lag_seconds",
            "Delay of a timer in the relay's event loop: the hidden wait of a new request.",
            bounds=LAG_BUCKETS_S,
        )
        self.in_flight = make.gauge("sidecar_requests_in_flight", "Requests in progress.")
        self.streams_open = make.gauge("sidecar_streams_open", "Replies being streamed to clients.")
        self.exchanges = make.labelled_counter(
            "sidecar_exchanges", "Model requests by outcome.", ["outcome"]
        )
        self.adapter_replies = make.labelled_counter(
            "sidecar_adapter_replies",
            "Model requests by the adapter that answered.",
            ["adapter", "arm"],
        )
        self.rehearsal_requests = make.labelled_counter(
            "sidecar_rehearsal_requests",
            "Model requests of rehearsals by outcome; no other metric of requests counts them.",
            ["outcome"],
        )
        self.clients_cut = make.labelled_counter(
            "sidecar_clients_cut",
            "Client connections closed early by the relay, by reason.",
            ["reason"],
        )
        self.request_body_bytes = make.gauge(
            "sidecar_request_body_bytes", "Memory held by long request bodies, in bytes."
        )
        self.bodies_refused = make.labelled_counter(
            "sidecar_bodies_refused",
            "Requests answered 503 because the memory for request bodies was used up.",
            ["reason"],
        )
        self.bodies_unreadable = make.labelled_counter(
            "sidecar_bodies_unreadable",
            "Requests answered 400 because their body could not be read.",
            ["reason"],
        )
        self.models_unknown = make.counter(
            "sidecar_models_unknown",
            "Model requests answered 404 because they name another model than the served one.",
        )
        self._upstreams(make)
        self._capture(make)
        self.forwarding = ForwardingMetrics(make)
        self._routing(make)
        self._workers(make)
        self._access(make)
        self._best_of(make)
        self._breaker(make)
        self._feedback(make)

    def _feedback(self, make: MetricSet) -> None:
        self.feedback_accepted = make.labelled_counter(
            "sidecar_feedback_accepted", "Feedback and outcomes written to the outbox.", ["kind"]
        )
        self.feedback_refused = make.labelled_counter(
            "sidecar_feedback_refused", "Feedback and outcomes refused, by reason.", ["reason"]
        )

    def _upstreams(self, make: MetricSet) -> None:
        self.upstream_retries = make.counter(
            "sidecar_upstream_retries",
            "Requests sent again because a kept-alive connection to vLLM was closed.",
        )
        self.upstream_failovers = make.counter(
            "sidecar_upstream_failovers",
            "Requests sent to another vLLM because the first was unreachable.",
        )
        self.replica_ejections = make.labelled_counter(
            "sidecar_replica_ejections",
            "Times a vLLM was taken out of rotation for a while because requests failed.",
            ["replica"],
        )
        self.adapter_missing = make.labelled_counter(
            "sidecar_adapter_missing",
            "Requests that vLLM refused because the adapter was not loaded.",
            ["adapter"],
        )
        self.replica_up = make.labelled_gauge(
            "sidecar_replica_up",
            "1 if every worker finds this vLLM healthy.",
            ["replica"],
            merge="min",
        )
        self.own_fields = make.labelled_counter(
            "sidecar_own_fields",
            "What became of fields that only the sidecar adds to requests, by vLLM.",
            ["replica", "event"],
        )
        self.replica_takes_fields = make.labelled_gauge(
            "sidecar_replica_takes_fields",
            "0 if a worker leaves out fields that only the sidecar adds: this vLLM refuses them.",
            ["replica", "fields"],
            merge="min",
        )
        self.replica_in_flight = make.labelled_gauge(
            "sidecar_replica_in_flight", "Requests in progress at this vLLM.", ["replica"]
        )

    def _capture(self, make: MetricSet) -> None:
        self.captures_kept = make.counter(
            "sidecar_captures_kept", "Exchanges written to the bus.", threads=True
        )
        self.captures_lost = make.labelled_counter(
            "sidecar_captures_lost",
            "Exchanges that were meant to be kept and were lost, by reason.",
            ["reason"],
            threads=True,
        )
        self.captures_skipped = make.labelled_counter(
            "sidecar_captures_skipped",
            "Exchanges that were not meant to be kept, by reason.",
            ["reason"],
        )
        self.outbox_rows_gone = make.counter(
            "sidecar_outbox_rows_gone",
            "Unread exchanges lost with a deleted outbox file.",
            threads=True,
        )
        self.untrainable = make.labelled_counter(
            "sidecar_exchanges_untrainable",
            "Exchanges kept that must not be trained on, by reason.",
            ["reason"],
            threads=True,
        )
        self.captures_bounded = make.labelled_counter(
            "sidecar_captures_bounded",
            "Values of exchanges that were changed because no store holds them, by reason.",
            ["reason"],
            threads=True,
        )
        self.model_mismatch = make.counter(
            "sidecar_model_mismatch",
            "Replies that name another model than the requested one. Alert on any.",
            threads=True,
        )
        self.capture_pending_bytes = make.gauge(
            "sidecar_capture_pending_bytes", "Captured bytes waiting in memory."
        )

    def _routing(self, make: MetricSet) -> None:
        self.routing_generation = make.gauge(
            "sidecar_routing_generation",
            "Generation of the routing table in use; the lowest of all workers.",
            merge="min",
        )
        self.project_generation = make.labelled_gauge(
            "sidecar_project_routing_generation",
            "As sidecar_routing_generation, of a project with adapters of its own.",
            ["project"],
            merge="min",
        )
        self.routing_failures = make.labelled_counter(
            "sidecar_routing_failures",
            "Failed polls of the routing table, by reason; the last table stays in use.",
            ["reason"],
            threads=True,
        )

    def _workers(self, make: MetricSet) -> None:
        self.workers_alive = make.gauge("sidecar_workers_alive", "Proxy processes that serve.")
        self.worker_restarts = worker_restarts(make)

    def _access(self, make: MetricSet) -> None:
        self.access_denied = make.labelled_counter(
            "sidecar_access_denied",
            "Requests rejected because of their API key or its limits.",
            ["reason"],
        )
        self.api_keys = make.gauge(
            "sidecar_api_keys", "API keys that are not revoked.", merge="min"
        )
        self.api_key_failures = make.labelled_counter(
            "sidecar_api_key_failures",
            "Failed polls of the API keys, and keys that could not be read.",
            ["reason"],
            threads=True,
        )
        self.limits_unchecked = limits_unchecked(make)
        self.limits_lost = limits_lost(make)

    def _breaker(self, make: MetricSet) -> None:
        self.bad_replies = make.labelled_counter(
            "sidecar_bad_replies",
            "Replies during a canary that the breaker counted as bad, by arm and kind.",
            ["arm", "kind"],
        )
        self.breaker_trips = make.labelled_counter(
            "sidecar_breaker_trips", "Canaries that the breaker took out.", ["kind"]
        )
        self.breaker_open = make.gauge(
            "sidecar_breaker_open",
            "1 if the breaker keeps the current canary out on this worker.",
        )
        self.project_breaker_open = make.labelled_gauge(
            "sidecar_project_breaker_open",
            "As sidecar_breaker_open, of a project with adapters of its own.",
            ["project"],
        )
        self.canary_fallbacks = make.counter(
            "sidecar_canary_fallbacks",
            "Requests answered by the champion because the canary failed before the first byte.",
        )

    def _best_of(self, make: MetricSet) -> None:
        self.best_of_requests = make.counter(
            "sidecar_best_of_requests", "Requests that asked for best of N."
        )
        self.best_of_picked = make.labelled_counter(
            "sidecar_best_of_picked",
            "Best-of-N requests answered by the judge's choice.",
            ["answer"],
        )
        self.best_of_fallbacks = make.labelled_counter(
            "sidecar_best_of_fallbacks",
            "Best-of-N requests that fell back or failed.",
            ["reason"],
        )
        self.best_of_judge = make.histogram(
            "sidecar_best_of_judge_seconds",
            "Time a best-of-N request waited for the judge.",
            bounds=LATENCY_BUCKETS_S,
        )
        self.best_of_unreturned_tokens = make.counter(
            "sidecar_best_of_unreturned_tokens",
            "Tokens of best-of-N answers that were not returned.",
        )


def worker_restarts(make: MetricSet) -> LabelledCounter:
    """Make the counter that the parent of several workers updates."""
    return make.labelled_counter(
        "sidecar_worker_restarts",
        "Proxy processes that ended unexpectedly and were restarted.",
        ["reason"],
    )


def limits_unchecked(make: MetricSet) -> LabelledCounter:
    """Counted by each worker, and by the parent of several."""
    return make.labelled_counter(
        "sidecar_limits_unchecked",
        "Requests and charges that the workers' shared table of limits could not decide.",
        ["reason"],
        threads=True,
    )


def limits_lost(make: MetricSet) -> LabelledCounter:
    """Counted by each worker, and by the parent of several."""
    return make.labelled_counter(
        "sidecar_limits_lost",
        "Losses of usage that limits had counted: of one key, or of all of them.",
        ["reason"],
        threads=True,
    )
