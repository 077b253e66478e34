"""OpenTelemetry metrics of finished requests, under the names of the GenAI conventions.

The recorder's thread updates them, off the request path, and only when a metrics endpoint is set.
Prometheus has its own metrics (`sidecar/metrics/proxy.py`); these are for backends that compare
models by the common names.
"""

from __future__ import annotations

from opentelemetry.metrics import Counter, Histogram, Meter

from sidecar.records import Exchange, RawCapture
from sidecar.tracing.attributes import PROVIDER, error_type, server_of, token_counts
from sidecar.tracing.genai_names import METRICS, OPERATIONS, Conventions

DURATION_BOUNDS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
"""Bucket bounds that the conventions advise."""
FIRST_CHUNK_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
TOKEN_BOUNDS = tuple(float(4**power) for power in range(14))


class GenAiMetrics:
    """Updates the metrics with one request at a time."""

    def __init__(self, meter: Meter, conventions: Conventions = "latest") -> None:
        names = METRICS[conventions]
        self._duration = meter.create_histogram(
            names.duration, "s", explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S
        )
        self._first_chunk = meter.create_histogram(
            names.first_chunk, "s", explicit_bucket_boundaries_advisory=FIRST_CHUNK_BOUNDS_S
        )
        self._token_histogram: Histogram | None = None
        self._token_counters: tuple[Counter, Counter] | None = None
        if names.tokens_are_histogram:
            self._token_histogram = meter.create_histogram(
                names.input_tokens, "{token}", explicit_bucket_boundaries_advisory=TOKEN_BOUNDS
            )
        else:
            self._token_counters = (
                meter.create_counter(names.input_tokens, "{token}"),
                meter.create_counter(names.output_tokens, "{token}"),
            )

    def record(self, raw: RawCapture, exchange: Exchange | None) -> None:
        """Record a request. exchange: None when it was not captured; its tokens are unknown
        then."""
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": OPERATIONS[raw.surface],
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": raw.public_model,
            "gen_ai.response.model": raw.route.upstream_model,
            **server_of(raw.replica),
        }
        if exchange is not None:
            self._tokens(exchange, attributes)
        if raw.streamed and raw.timings.first_byte_s is not None:
            self._first_chunk.record(raw.timings.first_byte_s, attributes)
        error = error_type(raw, exchange)
        if error is not None:
            attributes = {**attributes, "error.type": error}
        self._duration.record(raw.timings.total_s, attributes)

    def _tokens(self, exchange: Exchange, attributes: dict[str, str | int]) -> None:
        counts = token_counts(exchange)
        if self._token_histogram is not None:
            for kind, count in zip(("input", "output"), counts, strict=True):
                if count:
                    self._token_histogram.record(count, {**attributes, "gen_ai.token.type": kind})
        if self._token_counters is not None:
            # vLLM does not report how many prompt tokens are text and how many are pictures.
            for counter, modality, count in zip(
                self._token_counters, ("unknown", "text"), counts, strict=True
            ):
                counter.add(count, {**attributes, "gen_ai.token.modality": modality})
