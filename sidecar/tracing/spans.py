"""OpenTelemetry spans of finished requests, made off the request path with explicit times.

The span ids were chosen when the request was sent (`sidecar/tracing/trace_context.py`), so vLLM's
own spans are children of the span made here later. Names follow the GenAI semantic conventions.
Spans hold sizes, names and outcomes; content only with `telemetry.content`.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from sidecar.records import Exchange, RawCapture
from sidecar.settings import Telemetry
from sidecar.tracing.attributes import error_type, span_attributes
from sidecar.tracing.content import content_attributes
from sidecar.tracing.genai_metrics import GenAiMetrics
from sidecar.tracing.genai_names import OPERATIONS
from sidecar.tracing.telemetry import Tracing
from sidecar.tracing.trace_context import TraceParent, parse

NANOSECONDS = 1_000_000_000


class GivenIds(IdGenerator):
    """Gives a span the ids that were sent to vLLM, if there are any. For one thread."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.given: TraceParent | None = None

    def generate_span_id(self) -> int:
        given = self.given
        return given.span_id if given is not None else self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        given = self.given
        return given.trace_id if given is not None else self._random.generate_trace_id()


class RequestSpans:
    """Writes the span `chat <model>` and its child `capture`. For one thread at a time."""

    def __init__(
        self,
        provider: trace.TracerProvider | None,
        ids: GivenIds | None = None,
        *,
        metrics: GenAiMetrics | None = None,
        content: bool = False,
    ) -> None:
        """provider: None when only metrics are exported. ids: the provider's id generator; without
        it spans get new ids. metrics: updated with every request, sampled or not."""
        self._tracer = provider.get_tracer("sidecar") if provider is not None else None
        self._ids = ids or GivenIds()
        self._metrics = metrics
        self._content = content

    def request(self, raw: RawCapture, exchange: Exchange | None) -> trace.Span:
        """Return the ended span of a request; a non-recording one when its trace is not sampled.
        Its parent is the client's span if the client sent a `traceparent`."""
        if self._metrics is not None:
            self._metrics.record(raw, exchange)
        own = _parse(raw.own_traceparent)
        if self._tracer is None or (own is not None and not own.sampled):
            return trace.NonRecordingSpan(_context(own) if own else trace.INVALID_SPAN_CONTEXT)
        started_ns = int(raw.timings.started_at * NANOSECONDS)
        attributes = dict(span_attributes(raw, exchange))
        if self._content and exchange is not None:
            attributes |= content_attributes(exchange)
        parent = _parse(raw.traceparent)
        self._ids.given = own
        try:
            span = self._tracer.start_span(
                f"{OPERATIONS[raw.surface]} {raw.public_model}",
                context=trace.set_span_in_context(
                    trace.NonRecordingSpan(_context(parent)) if parent else trace.INVALID_SPAN
                ),
                kind=SpanKind.CLIENT,
                start_time=started_ns,
                attributes=attributes,
            )
        finally:
            self._ids.given = None
        if error_type(raw, exchange) is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(started_ns + int(raw.timings.total_s * NANOSECONDS))
        return span

    def capture(
        self, request: trace.Span, exchange: Exchange, *, began: float, ended: float
    ) -> None:
        """Make the span of assembling one capture. began, ended: unix seconds."""
        if self._tracer is None or not request.get_span_context().trace_flags.sampled:
            return
        span = self._tracer.start_span(
            "capture",
            context=trace.set_span_in_context(request),
            start_time=int(began * NANOSECONDS),
            attributes={
                "sidecar.exchange.id": exchange.exchange_id,
                "sidecar.untrainable_reason": exchange.untrainable_reason or "",
            },
        )
        span.end(int(ended * NANOSECONDS))


def request_spans(tracing: Tracing, telemetry: Telemetry) -> RequestSpans | None:
    """Return the spans that this process exports; None when it exports nothing."""
    if tracing.spans is None and tracing.metrics is None:
        return None
    ids = tracing.spans.id_generator if tracing.spans is not None else None
    metrics = None
    if tracing.metrics is not None:
        meter = tracing.metrics.get_meter("sidecar")
        metrics = GenAiMetrics(meter, telemetry.semantic_conventions)
    return RequestSpans(
        tracing.spans,
        ids if isinstance(ids, GivenIds) else None,
        metrics=metrics,
        content=tracing.content,
    )


def trace_id(span: trace.Span) -> str:
    """Return the trace id as 32 hex digits; empty when the span belongs to no trace."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _parse(header: str) -> TraceParent | None:
    return parse(header.encode("ascii", "replace"))


def _context(parent: TraceParent) -> SpanContext:
    return SpanContext(
        parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(parent.flags)
    )
