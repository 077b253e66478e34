"""Traces and OpenTelemetry metrics, from a client through the proxy to a real OTLP receiver."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from sidecar.settings import Telemetry
from sidecar.tracing import telemetry
from sidecar.tracing.spans import GivenIds
from sidecar.tracing.telemetry import Tracing, configure_tracing, content_by_environment
from support.fake_vllm import FakeVllm
from support.proxy_kit import Recorded, StartProxy, Wire

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
CHAT = b'{"model":"smollm2-135m","temperature":0.5,"messages":[{"role":"user","content":"secret"}]}'


@dataclass
class Collector:
    """What an OpenTelemetry collector was sent."""

    port: int
    bodies: list[tuple[str, bytes]] = field(default_factory=list)

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
        url = f"http://127.0.0.1:{self.port}/v1"
        asked = {
            "otlp_endpoint": f"{url}/traces",
            "otlp_metrics_endpoint": f"{url}/metrics",
            **telemetry,
        }
        return configure_tracing(Telemetry(**asked), "proxy", GivenIds())


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", lambda provider: None)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            found.bodies.append((self.path, body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


async def test_the_span_that_is_exported_is_the_one_that_vllm_was_told_of(
    recorded: Recorded,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
    collector: Collector,
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    tracing = collector.tracing()
    running = await start_proxy(tracing=tracing)
    headers = (
        f"traceparent: 00-{TRACE}-{SPAN}-01\r\ntracestate: vendor=1\r\n"
        "Authorization: Bearer top-secret-key\r\n"
    )

    await running.send(wire.post(CHAT, headers=headers))
    (exchange,) = await running.captured(1)
    tracing.shutdown()

    seen = fake_vllm.requests[0].headers
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
    assert (attributes["server.address"], attributes["server.port"]) == (
        "127.0.0.1",
        fake_vllm.port,
    )
    everything = b"".join(body for _, body in collector.bodies)
    assert b"secret" not in everything, "neither content nor keys"


async def test_a_trace_that_the_client_does_not_sample_goes_on_unsampled_and_unexported(
    recorded: Recorded,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
    collector: Collector,
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    tracing = collector.tracing(otlp_metrics_endpoint="")
    running = await start_proxy(tracing=tracing)

    await running.send(wire.post(CHAT, headers=f"traceparent: 00-{TRACE}-{SPAN}-00\r\n"))
    (exchange,) = await running.captured(1)
    tracing.shutdown()

    sent = fake_vllm.requests[0].headers["traceparent"]
    assert sent.startswith(f"00-{TRACE}-")
    assert sent.endswith("-00")
    assert SPAN not in sent
    assert exchange.trace_id == TRACE
    assert collector.bodies == []


async def test_a_request_without_a_trace_begins_one(
    recorded: Recorded,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
    collector: Collector,
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    tracing = collector.tracing()
    running = await start_proxy(tracing=tracing)

    await running.send(wire.post(CHAT, headers="traceparent: 00-rubbish\r\n"))
    await running.captured(1)
    tracing.shutdown()

    _, trace_id, span_id, _ = fake_vllm.requests[0].headers["traceparent"].split("-")
    chat = next(span for span in collector.spans if span.name.startswith("chat"))
    assert (chat.trace_id.hex(), chat.span_id.hex()) == (trace_id, span_id)
    assert chat.parent_span_id == b""


async def test_without_an_exporter_the_clients_trace_passes_untouched(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy(tracing=configure_tracing(Telemetry(), "proxy"))

    await running.send(wire.post(CHAT, headers=f"traceparent: 00-{TRACE}-{SPAN}-01\r\n"))
    await running.send(wire.post(CHAT))

    assert fake_vllm.requests[0].headers["traceparent"] == f"00-{TRACE}-{SPAN}-01"
    assert "traceparent" not in fake_vllm.requests[1].headers


async def test_content_is_in_the_span_only_when_asked_for(
    recorded: Recorded,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
    collector: Collector,
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    tracing = collector.tracing(content=True)
    running = await start_proxy(tracing=tracing)

    await running.send(wire.post(CHAT, headers="Authorization: Bearer top-key\r\n"))
    await running.captured(1)
    tracing.shutdown()

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


async def test_metrics_have_the_names_of_the_conventions(
    recorded: Recorded,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
    collector: Collector,
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    tracing = collector.tracing(otlp_endpoint="")
    running = await start_proxy(tracing=tracing)

    await running.send(wire.post(CHAT))
    (exchange,) = await running.captured(1)
    tracing.shutdown()

    metrics = collector.metrics
    assert "traceparent" not in fake_vllm.requests[0].headers, "no spans, no trace of ours"
    prompt, completion = len(exchange.prompt_token_ids), exchange.completion_tokens
    assert set(metrics) == {
        "gen_ai.client.inference.duration",
        "gen_ai.client.inference.usage.input_tokens",
        "gen_ai.client.inference.usage.output_tokens",
    }
    counted = [
        metrics[f"gen_ai.client.inference.usage.{kind}_tokens"].sum.data_points[0].as_int
        for kind in ("input", "output")
    ]
    duration = metrics["gen_ai.client.inference.duration"]
    assert counted == [prompt, completion]
    (point,) = duration.histogram.data_points
    assert (point.count, duration.unit) == (1, "s")
    assert values(point.attributes)["gen_ai.response.model"] == "smollm2-135m"


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
