"""OpenTelemetry spans of finished requests, made off the request path, and W3C trace context.

The span ids were chosen when the request was sent (`sidecar/tracing/spans.py`), so vLLM's
own spans are children of the span made here later. Names follow the GenAI semantic conventions.
Spans hold sizes, names and outcomes; content only with `telemetry.content`.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from sidecar.errors import UNREADABLE_JSON
from sidecar.records import Exchange, RawCapture
from sidecar.settings import Telemetry
from sidecar.tracing.telemetry import OPERATIONS, GenAiMetrics, Tracing, error_type, span_attributes

# W3C trace context: read the `traceparent` of a request and make the one sent to vLLM. Pure.

SAMPLED = 0x01
_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.DOTALL,
)
_VERSION = b"00"


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The fields of a `traceparent`: trace, parent span, flags."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


def parse(header: bytes | None) -> TraceParent | None:
    """Return None when the header is absent or malformed: a new trace begins here then."""
    found = _match(header)
    if found is None:
        return None
    return TraceParent(int(found[2], 16), int(found[3], 16), int(found[4], 16))


class Propagation:
    """Makes the `traceparent` that is sent to vLLM, in about a microsecond.

    A request that belongs to a trace stays in it: same trace id, same sampled flag, our span as the
    parent. For other requests a new trace begins, which is sampled.
    """

    def __init__(self, randbits: Callable[[int], int] = random.getrandbits) -> None:
        self._randbits = randbits

    def outgoing(self, header: bytes | None) -> bytes:
        """Return the header to send. header: as the client sent it."""
        span_id = self._randbits(64) or 1
        found = _match(header)
        if found is not None:
            # This version defines only the `sampled` flag; other flags are not passed on.
            flags = int(found[4], 16) & SAMPLED
            return b"00-%b-%016x-%02x" % (found[2], span_id, flags)
        trace_id = self._randbits(128) or 1
        return b"00-%032x-%016x-%02x" % (trace_id, span_id, SAMPLED)


def _match(header: bytes | None) -> re.Match[bytes] | None:
    if not header:
        return None
    found = _PARENT.fullmatch(header)
    # Version 00 has four fields; a later one may have more.
    if found is None or (found[5] is not None and found[1] == _VERSION):
        return None
    return found


# Span attributes with the content of a request, in the form of the GenAI conventions. Pure.

Part = dict[str, Any]  # Any: arguments and results of tools have any type


def content_attributes(exchange: Exchange) -> dict[str, str]:
    """Return `gen_ai.input.messages`, `gen_ai.output.messages` and, if there are tools,
    `gen_ai.tool.definitions`."""
    said = [
        # The message is ours, so it is valid JSON.
        {**_message(json.loads(one.message)), "finish_reason": one.finish_reason or ""}
        for one in exchange.choices
    ]
    # ASCII: a lone surrogate, which JSON may hold, would make the export of a batch fail.
    attributes = {"gen_ai.output.messages": json.dumps(said)}
    try:
        request = json.loads(exchange.request)
    except UNREADABLE_JSON:
        request = None
    if isinstance(request, dict):
        attributes["gen_ai.input.messages"] = json.dumps(_input(request))
        if request.get("tools"):
            attributes["gen_ai.tool.definitions"] = json.dumps(request["tools"])
    return attributes


def _input(request: dict[str, Any]) -> list[Part]:
    """Return the input of any surface: `messages` of chat and Anthropic's API, `input` of
    responses, `prompt` of completions, with system instructions from their own fields."""
    messages = []
    for key in ("system", "instructions"):
        if request.get(key):
            messages.append({"role": "system", "parts": list(_parts(request[key]))})
    said = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(said, str):
        messages.append({"role": "user", "parts": [_said(said)]})
    elif isinstance(said, list):
        messages += [_message(one) for one in said]
    return messages


def _message(item: object) -> Part:
    if not isinstance(item, dict):  # one prompt of a list
        return {"role": "user", "parts": [_said(str(item))]}
    if item.get("type") in ("function_call", "function_call_output"):  # of the responses surface
        role = "assistant" if item["type"] == "function_call" else "tool"
        return {"role": role, "parts": [_part(item)]}
    role = str(item.get("role", "user"))
    if role == "tool":
        return {"role": role, "parts": [_response(item.get("tool_call_id"), item.get("content"))]}
    said = [*_parts(item.get("content")), *_parts(item.get("refusal"))]
    if thought := item.get("reasoning") or item.get("reasoning_content"):
        said.insert(0, {"type": "reasoning", "content": thought})
    return {"role": role, "parts": [*said, *_calls(item)]}


def _parts(content: object) -> Iterable[Part]:
    if isinstance(content, str):
        yield _said(content)
    elif isinstance(content, list):
        for item in content:
            yield _part(item) if isinstance(item, dict) else _said(str(item))


def _part(item: dict[str, Any]) -> Part:
    kind = item.get("type")
    if kind in ("text", "input_text", "output_text"):
        return _said(item.get("text"))
    if kind == "thinking":
        return {"type": "reasoning", "content": item.get("thinking")}
    if kind == "tool_use":
        return _call(item.get("id"), item.get("name"), item.get("input"))
    if kind == "function_call":
        return _call(item.get("call_id"), item.get("name"), item.get("arguments"))
    if kind == "tool_result":
        return _response(item.get("tool_use_id"), item.get("content"))
    if kind == "function_call_output":
        return _response(item.get("call_id"), item.get("output"))
    return {"type": str(kind)}


def _calls(message: dict[str, Any]) -> Iterable[Part]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield _call(call.get("id"), function.get("name"), function.get("arguments"))


def _call(call_id: object, name: object, arguments: object) -> Part:
    if isinstance(arguments, str):
        # A model may write anything here; invalid JSON is shown as text.
        with contextlib.suppress(*UNREADABLE_JSON):
            arguments = json.loads(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _response(call_id: object, response: object) -> Part:
    return {"type": "tool_call_response", "id": call_id, "response": response}


def _said(text: object) -> Part:
    return {"type": "text", "content": text}


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
    return RequestSpans(
        tracing.spans,
        ids if isinstance(ids, GivenIds) else None,
        metrics=GenAiMetrics(tracing.metrics.get_meter("sidecar")) if tracing.metrics else None,
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
