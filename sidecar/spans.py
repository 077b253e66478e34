"""OpenTelemetry spans of finished requests, made off the path with explicit times.

Names follow the GenAI semantic conventions (open-telemetry/semantic-conventions-genai, which split
from semconv 1.42; all "Development"). Sizes, names and outcomes only; never content.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sidecar.assemble import RawCapture
from sidecar.records import Exchange

_PROPAGATOR = TraceContextTextMapPropagator()
NANOSECONDS = 1_000_000_000


class RequestSpans:
    """Writes `chat <model>` and, below it, `capture`."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("sidecar")

    def request(self, raw: RawCapture, exchange: Exchange | None) -> trace.Span:
        """The span of a request, ended. Under the client's span when it sent a `traceparent`."""
        context = _PROPAGATOR.extract({"traceparent": raw.traceparent})
        started_ns = int(raw.timings.started_at * NANOSECONDS)
        span = self._tracer.start_span(
            f"chat {raw.public_model}",
            context=context,
            kind=SpanKind.CLIENT,
            start_time=started_ns,
            attributes=_attributes(raw, exchange),
        )
        outcome = raw.outcome if exchange is None else exchange.outcome
        if outcome == "upstream_error":
            span.set_attribute("error.type", str(raw.status))
            span.set_status(Status(StatusCode.ERROR))
        span.end(started_ns + int(raw.timings.total_s * NANOSECONDS))
        return span

    def capture(
        self, request: trace.Span, exchange: Exchange, *, began: float, ended: float
    ) -> None:
        """The span of reading one capture. began, ended: unix seconds."""
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


def trace_id(span: trace.Span) -> str:
    """32 hex digits."""
    return f"{span.get_span_context().trace_id:032x}"


def _attributes(raw: RawCapture, exchange: Exchange | None) -> dict[str, str | int | float | bool]:
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": raw.public_model,
        "gen_ai.request.stream": raw.streamed,
        "gen_ai.response.model": raw.route.upstream_model,
        "gen_ai.conversation.id": raw.session_key,
        "http.response.status_code": raw.status,
        "sidecar.exchange.id": raw.exchange_id,
        "sidecar.adapter": raw.route.adapter,
        "sidecar.arm": raw.route.arm,
        "sidecar.outcome": raw.outcome,
        "sidecar.overhead_s": raw.timings.overhead_s,
    }
    if raw.timings.first_byte_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = raw.timings.first_byte_s
    if exchange is None:
        return attributes
    sampling = exchange.sampling
    if sampling.temperature is not None:
        attributes["gen_ai.request.temperature"] = sampling.temperature
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    attributes["gen_ai.request.choice.count"] = len(exchange.choices)
    attributes["gen_ai.usage.input_tokens"] = len(exchange.prompt_token_ids)
    attributes["gen_ai.usage.output_tokens"] = exchange.completion_tokens or sum(
        len(choice.token_ids) for choice in exchange.choices
    )
    return attributes
