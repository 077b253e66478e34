"""OpenTelemetry for every process: set-up, names, and attributes of spans and metrics.

Spans hold sizes, names and outcomes; content only with `telemetry.content`, and never keys. Without
an endpoint or a file no provider is made, and no spans.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from sidecar.records import Exchange, RawCapture, Surface
from sidecar.settings import Telemetry
from sidecar.settings.kinds import ask_loopback_directly

log = structlog.get_logger()
EXIT_S = 1.0
"""How long what was not sent yet may hold the end of a process. The exporters' own limit is 10 s
for each try, and longer where a collector takes connections and does not answer."""
CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class JsonLinesExporter(SpanExporter):
    """Appends finished spans to a file, one JSON object a line. For the demo and for tests."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(_as_dict(span)) + "\n" for span in spans)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


class _Counted(SpanExporter):
    """Counts the spans that an exporter sent."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _ToCollector(BatchSpanProcessor):
    """Sends spans in batches, and knows how many were not sent."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._counted = _Counted(exporter)
        super().__init__(self._counted)
        self._ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._ended += 1
        super().on_end(span)

    @property
    def unsent(self) -> int:
        return self._ended - self._counted.sent


def _as_dict(span: ReadableSpan) -> dict[str, object]:
    context = span.get_span_context()
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}" if context else "",
        "span_id": f"{context.span_id:016x}" if context else "",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "process": span.resource.attributes.get("service.instance.id", ""),
        "attributes": dict(span.attributes or {}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """The exporters of this process. None: that kind is not exported."""

    spans: TracerProvider | None
    metrics: MeterProvider | None
    content: bool
    """Spans may hold the content of requests."""
    collector: _ToCollector | None = field(default=None, repr=False)

    def shutdown(self) -> None:
        """Send what waits, for `EXIT_S` at most, and stop the exporters. Call it when the process
        ends."""
        ends = [
            threading.Thread(target=one.shutdown, name="telemetry", daemon=True)
            for one in (self.spans, self.metrics)
            if one is not None
        ]
        deadline = time.monotonic() + EXIT_S
        for end in ends:
            end.start()
        for end in ends:
            end.join(max(0.0, deadline - time.monotonic()))
        late = any(end.is_alive() for end in ends)
        unsent = self.collector.unsent if self.collector is not None else 0
        if late or unsent:
            log.warning("telemetry_not_sent", spans=unsent, given_up_after_s=EXIT_S if late else 0)


def configure_tracing(
    telemetry: Telemetry, process: str, id_generator: IdGenerator | None = None
) -> Tracing:
    """Set up spans and OpenTelemetry metrics for this process, if they have a destination."""
    if telemetry.otlp_endpoint or telemetry.otlp_metrics_endpoint:
        ask_loopback_directly(os.environ, telemetry.otlp_endpoint, telemetry.otlp_metrics_endpoint)
    resource = Resource.create({"service.name": "learning-sidecar", "service.instance.id": process})
    collector = None
    if telemetry.otlp_endpoint:
        collector = _ToCollector(OTLPSpanExporter(endpoint=telemetry.otlp_endpoint))
    return Tracing(
        spans=_spans(telemetry, resource, id_generator, collector),
        metrics=_metrics(telemetry, resource),
        content=telemetry.content or content_by_environment(os.environ.get(CONTENT_VARIABLE, "")),
        collector=collector,
    )


def content_by_environment(value: str) -> bool:
    """Return True if OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT, which all GenAI
    instrumentations read, asks for content in spans. Pure."""
    return value.lower() in ("true", "span_only", "span_and_event")


def _spans(
    telemetry: Telemetry,
    resource: Resource,
    id_generator: IdGenerator | None,
    collector: _ToCollector | None,
) -> TracerProvider | None:
    if not telemetry.otlp_endpoint and not telemetry.spans_file:
        return None
    # Not at the interpreter's exit, which would wait for a collector without a limit.
    provider = TracerProvider(resource=resource, id_generator=id_generator, shutdown_on_exit=False)
    if telemetry.spans_file:
        path = Path(telemetry.spans_file)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        provider.add_span_processor(
            BatchSpanProcessor(JsonLinesExporter(path), schedule_delay_millis=500)
        )
    if collector is not None:  # the last: the ones before it must not wait for it at the end
        provider.add_span_processor(collector)
    trace.set_tracer_provider(provider)
    return provider


def _metrics(telemetry: Telemetry, resource: Resource) -> MeterProvider | None:
    if not telemetry.otlp_metrics_endpoint:
        return None
    exporter = OTLPMetricExporter(endpoint=telemetry.otlp_metrics_endpoint)
    reader = PeriodicExportingMetricReader(exporter)
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)


# The names of the GenAI semantic conventions that the sidecar uses, in one table.

OPERATIONS: dict[Surface, str] = {
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
}
"""`gen_ai.operation.name` of each surface."""


# Attributes of spans and OpenTelemetry metrics of a request: names, sizes, outcomes. Pure.

PROVIDER = "vllm"
"""`gen_ai.provider.name`; the conventions define no name for vLLM."""
Attribute = str | int | float | bool | tuple[str, ...]


def span_attributes(raw: RawCapture, exchange: Exchange | None) -> dict[str, Attribute]:
    """Return the attributes of a request's span. exchange: None when the request was not
    captured."""
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": OPERATIONS[raw.surface],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": raw.public_model,
        "gen_ai.request.stream": raw.streamed,
        "gen_ai.response.model": raw.route.upstream_model,
        "gen_ai.conversation.id": raw.session_key,
        "http.response.status_code": raw.status,
        "sidecar.exchange.id": raw.exchange_id,
        "sidecar.adapter": raw.route.adapter,
        "sidecar.arm": raw.route.arm,
        "sidecar.outcome": raw.outcome if exchange is None else exchange.outcome,
        "sidecar.overhead_s": raw.timings.overhead_s,
        **server_of(raw.replica),
    }
    if raw.timings.first_byte_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = raw.timings.first_byte_s
    error = error_type(raw, exchange)
    if error is not None:
        attributes["error.type"] = error
    if exchange is not None:
        attributes |= _of_exchange(exchange)
    return attributes


def _of_exchange(exchange: Exchange) -> dict[str, Attribute]:
    sampling = exchange.sampling
    asked = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
    }
    attributes: dict[str, Attribute] = {
        f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None
    }
    prompt, completion = token_counts(exchange)
    attributes["gen_ai.request.choice.count"] = len(exchange.choices)
    attributes["gen_ai.usage.input_tokens"] = prompt
    attributes["gen_ai.usage.output_tokens"] = completion
    reasons = tuple(choice.finish_reason or "" for choice in exchange.choices)
    if any(reasons):
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes


def token_counts(exchange: Exchange) -> tuple[int, int]:
    """Return the token counts of the prompt and of all answers; 0 where vLLM reported none."""
    ids = sum(len(choice.token_ids) for choice in exchange.choices)
    written = exchange.prompt_ids
    prompt = written.count(b",") + 1 if written else len(exchange.prompt_token_ids)
    return prompt, exchange.completion_tokens or ids


def error_type(raw: RawCapture, exchange: Exchange | None) -> str | None:
    """Return `error.type`: the status, or `broken_reply` when a reply with status 200 broke off.
    None when vLLM did not fail; a client that left is no error."""
    if raw.status >= 400:
        return str(raw.status)
    outcome = raw.outcome if exchange is None else exchange.outcome
    return "broken_reply" if outcome == "upstream_error" else None


@lru_cache(maxsize=256)
def server_of(replica: str) -> dict[str, str | int]:
    """`server.address` and `server.port` of a replica's base URL."""
    parts = urlsplit(replica)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname or "", "server.port": port}


# OpenTelemetry metrics of finished requests, under the names of the GenAI conventions.

DURATION_BOUNDS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
"""Bucket bounds that the conventions advise."""
FIRST_CHUNK_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip


class GenAiMetrics:
    """Updates the metrics with one request at a time."""

    def __init__(self, meter: Meter) -> None:
        name = "gen_ai.client.inference"
        self._duration = meter.create_histogram(
            f"{name}.duration", "s", explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S
        )
        self._first_chunk = meter.create_histogram(
            f"{name}.time_to_first_chunk",
            "s",
            explicit_bucket_boundaries_advisory=FIRST_CHUNK_BOUNDS_S,
        )
        self._tokens = tuple(
            meter.create_counter(f"{name}.usage.{kind}_tokens", "{token}")
            for kind in ("input", "output")
        )

    def record(self, raw: RawCapture, exchange: Exchange | None) -> None:
        """Record a user's request. exchange: None when it was not captured; its tokens are unknown
        then."""
        if raw.origin != "user":
            return
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": OPERATIONS[raw.surface],
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": raw.public_model,
            "gen_ai.response.model": raw.route.upstream_model,
            **server_of(raw.replica),
        }
        if exchange is not None:
            # vLLM does not report how many prompt tokens are text and how many are pictures.
            for counter, modality, count in zip(
                self._tokens, ("unknown", "text"), token_counts(exchange), strict=True
            ):
                counter.add(count, {**attributes, "gen_ai.token.modality": modality})
        if raw.streamed and raw.timings.first_byte_s is not None:
            self._first_chunk.record(raw.timings.first_byte_s, attributes)
        error = error_type(raw, exchange)
        if error is not None:
            attributes = {**attributes, "error.type": error}
        self._duration.record(raw.timings.total_s, attributes)
