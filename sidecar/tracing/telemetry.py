"""Set up OpenTelemetry, in the same way for every process.

Spans hold sizes, names and outcomes; content only with `telemetry.content`, and never keys. Without
an endpoint or a file no provider is made, and no spans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from sidecar.settings import Telemetry
from sidecar.settings.no_proxy import ask_loopback_directly

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

    def shutdown(self) -> None:
        """Flush and stop the exporters. Call it when the process ends."""
        if self.spans is not None:
            self.spans.shutdown()
        if self.metrics is not None:
            self.metrics.shutdown()


def configure_tracing(
    telemetry: Telemetry, process: str, id_generator: IdGenerator | None = None
) -> Tracing:
    """Set up spans and OpenTelemetry metrics for this process, if they have a destination."""
    if telemetry.otlp_endpoint or telemetry.otlp_metrics_endpoint:
        ask_loopback_directly(os.environ, telemetry.otlp_endpoint, telemetry.otlp_metrics_endpoint)
    resource = Resource.create({"service.name": "learning-sidecar", "service.instance.id": process})
    return Tracing(
        spans=_spans(telemetry, resource, id_generator),
        metrics=_metrics(telemetry, resource),
        content=telemetry.content or content_by_environment(os.environ.get(CONTENT_VARIABLE, "")),
    )


def content_by_environment(value: str) -> bool:
    """Return True if OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT, which all GenAI
    instrumentations read, asks for content in spans. Pure."""
    return value.lower() in ("true", "span_only", "span_and_event")


def _spans(
    telemetry: Telemetry, resource: Resource, id_generator: IdGenerator | None
) -> TracerProvider | None:
    if not telemetry.otlp_endpoint and not telemetry.spans_file:
        return None
    provider = TracerProvider(resource=resource, id_generator=id_generator)
    if telemetry.otlp_endpoint:
        exporter = OTLPSpanExporter(endpoint=telemetry.otlp_endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    if telemetry.spans_file:
        path = Path(telemetry.spans_file)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        provider.add_span_processor(
            BatchSpanProcessor(JsonLinesExporter(path), schedule_delay_millis=500)
        )
    trace.set_tracer_provider(provider)
    return provider


def _metrics(telemetry: Telemetry, resource: Resource) -> MeterProvider | None:
    if not telemetry.otlp_metrics_endpoint:
        return None
    exporter = OTLPMetricExporter(endpoint=telemetry.otlp_metrics_endpoint)
    return MeterProvider([PeriodicExportingMetricReader(exporter)], resource=resource)
