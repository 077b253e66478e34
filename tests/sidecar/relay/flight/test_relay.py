"""The relay over real sockets: what the client gets, what vLLM gets, what is recorded."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.routing.table import RoutingTable
from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

REQUEST = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}],"temperature":0}'
Recorded = Callable[[str], bytes]


async def test_vllm_is_asked_for_ids_and_gets_everything_else_as_it_came(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    sent = "Authorization: Bearer k\r\nX-Request-Id: r-1\r\nX-Sidecar-Session: s\r\n"

    await running.send(wire.post(REQUEST, headers=sent, path="/v1/chat/completions?x=1"))

    seen = fake_vllm.requests[0]
    assert seen.line == "POST /v1/chat/completions?x=1 HTTP/1.1"
    assert seen.body == b'{"return_token_ids":true,"logprobs":true,' + REQUEST[1:]
    assert seen.headers["authorization"] == "Bearer k"
    assert seen.headers["x-request-id"] == "r-1"
    assert seen.headers["host"] == f"127.0.0.1:{fake_vllm.port}"
    assert not [name for name in seen.headers if name.startswith("x-sidecar")]


async def test_a_client_of_http_1_0_gets_a_reply_without_chunks(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    stream = recorded("whole_stream_asked.sse")
    fake_vllm.script = lambda _: [wire.STREAM_HEAD, wire.chunk(stream), wire.LAST_CHUNK]
    running = await start_proxy()
    sent = wire.post(REQUEST, close=False).replace(b"HTTP/1.1", b"HTTP/1.0", 1)

    _, headers, body = wire.split(await running.send(sent))

    assert "transfer-encoding" not in headers
    assert body == recorded("whole_stream_plain.sse")


async def test_another_404_is_passed_on(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    other = b'{"error":{"message":"no such tool","type":"NotFoundError","param":"tool"}}'
    fake_vllm.script = lambda _: [wire.whole_reply(other, "404 Not Found")]
    running = await start_proxy()
    running.proxy.routing.table = RoutingTable(model="smollm2-135m", champion="a", generation=1)

    line, headers, body = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, body, len(fake_vllm.requests)) == ("HTTP/1.1 404 Not Found", other, 2)
    assert headers["content-length"] == str(len(other))


async def test_figures_of_a_request_are_counted(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    running = await start_proxy()

    await running.send(wire.post(REQUEST))
    await running.captured(1)

    await running.metric_reaches(1, "sidecar_captures_kept_total")
    assert running.metric("sidecar_requests_total", status="200") == 1
    assert running.metric("sidecar_requests_in_flight") == 0
    for histogram in ("ttft", "request_duration", "proxy_overhead"):
        assert running.metric(f"sidecar_{histogram}_seconds_count") == 1
    total_s = running.metric("sidecar_request_duration_seconds_sum")
    assert 0 < running.metric("sidecar_proxy_overhead_seconds_sum") < total_s
    assert running.metric("sidecar_adapter_replies_total", adapter="base", arm="champion") == 1
