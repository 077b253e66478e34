"""OpenTelemetry spans, the same set-up for every process.

Spans carry sizes, names and outcomes; never content, never keys. Without an endpoint or a file
they are made and dropped, which costs microseconds and keeps one code path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from sidecar.settings import Telemetry


class JsonLinesExporter(SpanExporter):
    """Append finished spans to a file, one JSON object a line. For the demo and for tests."""

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


def configure_tracing(telemetry: Telemetry, process: str) -> TracerProvider:
    """Set up tracing for this process. Call `shutdown()` on the result at the end: it flushes."""
    resource = Resource.create({"service.name": "learning-sidecar", "service.instance.id": process})
    provider = TracerProvider(resource=resource)
    if telemetry.otlp_endpoint:
        exporter = OTLPSpanExporter(endpoint=telemetry.otlp_endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    if telemetry.spans_file:
        path = Path(telemetry.spans_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        provider.add_span_processor(
            BatchSpanProcessor(JsonLinesExporter(path), schedule_delay_millis=500)
        )
    trace.set_tracer_provider(provider)
    return provider
