"""Traces and OpenTelemetry metrics, from a client through the proxy to a real OTLP receiver."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from sidecar.records import Exchange
from sidecar.settings import Telemetry
from sidecar.tracing import telemetry
from sidecar.tracing.spans import GivenIds
from sidecar.tracing.telemetry import Tracing, configure_tracing, content_by_environment
from support.fake_vllm import FakeVllm
from support.outside_server import OutsideServer, outside_server
from support.proxy_kit import Recorded, StartProxy, Wire

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
CHAT = b'{"model":"smollm2-135m","temperature":0.5,"messages":[{"role":"user","content":"secret"}]}'


@dataclass
class Collector:
    """What an OpenTelemetry collector was sent."""

    server: OutsideServer

    @property
    def bodies(self) -> list[tuple[str, bytes]]:
        return [
            (one.path, gzip.decompress(one.body) if "content-encoding" in one.headers else one.body)
            for one in self.server.asked
        ]

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for path, body in self.bodies
            if path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            metric.name: metric
            for path, body in self.bodies
            if path == "/v1/metrics"
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def tracing(self, **telemetry: Any) -> Tracing:
        url = f"{self.server.url}/v1"
        asked = {
            "otlp_endpoint": f"{url}/traces",
            "otlp_metrics_endpoint": f"{url}/metrics",
            **telemetry,
        }
        return configure_tracing(Telemetry(**asked), "proxy", GivenIds())


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", lambda provider: None)

    with outside_server() as server:
        server.headers["content-type"] = "application/x-protobuf"
        server.body = b""
        yield Collector(server)


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


Ask = Callable[..., Awaitable[tuple[dict[str, str], Exchange]]]


@pytest.fixture
def ask(recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire) -> Ask:
    """Send a chat through a proxy with this tracing, and end the tracing. Returns: the headers that
    vLLM got, and what was captured."""

    async def ask(tracing: Tracing, headers: str = "") -> tuple[dict[str, str], Exchange]:
        fake_vllm.play(wire.whole_reply(recorded("whole_reply_asked.json")))
        running = await start_proxy(tracing=tracing)
        await running.send(wire.post(CHAT, headers=headers))
        (exchange,) = await running.captured(1)
        tracing.shutdown()
        return fake_vllm.requests[0].headers, exchange

    return ask


async def test_the_span_that_is_exported_is_the_one_that_vllm_was_told_of(
    fake_vllm: FakeVllm, ask: Ask, collector: Collector
) -> None:
    headers = (
        f"traceparent: 00-{TRACE}-{SPAN}-01\r\ntracestate: vendor=1\r\n"
        "Authorization: Bearer top-secret-key\r\n"
    )

    seen, exchange = await ask(collector.tracing(), headers)

    version, trace_id, span_id, flags = seen["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "01")
    assert span_id != SPAN
    assert seen["tracestate"] == "vendor=1"
    chat, capture = sorted(collector.spans, key=lambda span: span.name, reverse=True)
    assert (chat.name, capture.name) == ("chat smollm2-135m", "capture")
    assert chat.trace_id.hex() == capture.trace_id.hex() == exchange.trace_id == TRACE
    assert (chat.parent_span_id.hex(), chat.span_id.hex()) == (SPAN, span_id)
    assert capture.parent_span_id == chat.span_id
    attributes = values(chat.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.output_tokens"] == exchange.completion_tokens
    server = (attributes["server.address"], attributes["server.port"])
    assert server == ("127.0.0.1", fake_vllm.port)
    everything = b"".join(body for _, body in collector.bodies)
    assert b"secret" not in everything, "neither content nor keys"


async def test_a_trace_that_the_client_does_not_sample_goes_on_unsampled_and_unexported(
    ask: Ask, collector: Collector
) -> None:
    tracing = collector.tracing(otlp_metrics_endpoint="")

    seen, exchange = await ask(tracing, f"traceparent: 00-{TRACE}-{SPAN}-00\r\n")

    assert seen["traceparent"].startswith(f"00-{TRACE}-")
    assert seen["traceparent"].endswith("-00")
    assert SPAN not in seen["traceparent"]
    assert exchange.trace_id == TRACE
    assert collector.bodies == []


async def test_a_request_without_a_trace_begins_one(ask: Ask, collector: Collector) -> None:
    seen, _ = await ask(collector.tracing(), "traceparent: 00-rubbish\r\n")

    _, trace_id, span_id, _ = seen["traceparent"].split("-")
    chat = next(span for span in collector.spans if span.name.startswith("chat"))
    assert (chat.trace_id.hex(), chat.span_id.hex()) == (trace_id, span_id)
    assert chat.parent_span_id == b""


async def test_content_is_in_the_span_only_when_asked_for(
    recorded: Recorded, ask: Ask, collector: Collector
) -> None:
    await ask(collector.tracing(content=True), "Authorization: Bearer top-key\r\n")

    chat = next(span for span in collector.spans if span.name.startswith("chat"))
    attributes = values(chat.attributes)
    assert json.loads(attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "secret"}]}
    ]
    plain = json.loads(recorded("whole_reply_plain.json"))["choices"][0]
    assert json.loads(attributes["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": plain["message"]["content"]}],
            "finish_reason": plain["finish_reason"],
        }
    ]
    assert b"top-key" not in b"".join(body for _, body in collector.bodies)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", False), ("NO_CONTENT", False), ("EVENT_ONLY", False), ("SPAN_ONLY", True),
     ("span_and_event", True), ("true", True)],
)  # fmt: skip
def test_the_standard_variable_asks_for_content_too(value: str, expected: bool) -> None:
    assert content_by_environment(value) is expected


async def test_metrics_have_the_names_of_the_conventions(ask: Ask, collector: Collector) -> None:
    seen, exchange = await ask(collector.tracing(otlp_endpoint=""))

    assert "traceparent" not in seen, "no spans, no trace of ours"
    duration, *tokens = (
        collector.metrics.pop(f"gen_ai.client.inference.{name}")
        for name in ("duration", "usage.input_tokens", "usage.output_tokens")
    )
    counted = [one.sum.data_points[0].as_int for one in tokens]
    assert counted == [len(exchange.prompt_token_ids), exchange.completion_tokens]
    (point,) = duration.histogram.data_points
    assert (point.count, duration.unit) == (1, "s")
    assert values(point.attributes)["gen_ai.response.model"] == "smollm2-135m"
    assert len(collector.metrics) == 3


def test_a_collector_that_never_answers_does_not_hold_the_end_and_what_it_missed_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(telemetry, "EXIT_S", 2.0)
    silent, reached = threading.Event(), threading.Event()

    def export(_exporter: object, _spans: object) -> SpanExportResult:
        reached.set()
        silent.wait()
        return SpanExportResult.FAILURE

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    file = tmp_path / "spans.jsonl"
    tracing = configure_tracing(
        Telemetry(otlp_endpoint="http://127.0.0.1:9/v1/traces", spans_file=str(file)), "proxy"
    )
    assert tracing.spans is not None
    for _ in range(3):
        tracing.spans.get_tracer("test").start_span("one").end()

    with structlog.testing.capture_logs() as logged:
        tracing.shutdown()

    assert not silent.is_set()
    (event,) = [one for one in logged if one["event"] == "telemetry_not_sent"]
    assert (event["spans"], event["given_up_after_s"]) == (3, 2.0)
    assert len(file.read_text().splitlines()) == 3  # the file does not wait for the collector
    assert reached.wait(60)
    silent.set()


def test_what_a_collector_took_is_not_counted_as_lost(collector: Collector) -> None:
    tracing = collector.tracing()
    assert tracing.spans is not None
    tracing.spans.get_tracer("test").start_span("one").end()

    with structlog.testing.capture_logs() as logged:
        tracing.shutdown()

    assert logged == []
