"""The relay over real sockets: what the client gets, what vLLM gets, what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.routing.table import RoutingTable
from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

REQUEST = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}],"temperature":0}'
Recorded = Callable[[str], bytes]


@pytest.mark.parametrize("name", ["whole", "tools"])
async def test_a_captured_reply_is_the_direct_one_byte_for_byte(
    name: str, recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded(f"{name}_reply_asked.json"))]
    running = await start_proxy()

    line, headers, body = wire.split(await running.send(wire.post(REQUEST)))

    plain = recorded(f"{name}_reply_plain.json")
    assert (line, body) == ("HTTP/1.1 200 OK", plain)
    assert headers["content-length"] == str(len(plain))
    assert (headers["server"], headers["date"]) == ("uvicorn", "Sat, 21 Nov 2026 03:57:56 GMT")
    assert headers["x-sidecar-adapter"] == "base"
    exchange = (await running.captured(1))[0]
    assert headers["x-sidecar-exchange-id"] == exchange.exchange_id
    assert (exchange.untrainable_reason, exchange.status, exchange.request) == (None, 200, REQUEST)


async def test_a_captured_stream_is_the_direct_one_byte_for_byte(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    events = recorded("tools_stream_asked.sse").split(b"\n\n")[:-1]
    chunks = [wire.chunk(event + b"\n\n") for event in events]
    fake_vllm.script = lambda _: [wire.STREAM_HEAD, *chunks, wire.LAST_CHUNK]
    running = await start_proxy()

    line, headers, body = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, headers["transfer-encoding"]) == ("HTTP/1.1 200 OK", "chunked")
    assert body == recorded("tools_stream_plain.sse")
    exchange = (await running.captured(1))[0]
    assert (exchange.stream, exchange.outcome, exchange.untrainable_reason) == (True, "ok", None)
    assert json.loads(exchange.choices[0].message)["tool_calls"][0]["function"]["name"] == (
        "get_weather"
    )


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


@pytest.mark.parametrize(
    ("headers", "capture", "reason"),
    [
        ("x-sidecar-capture: off\r\n", {}, "header"),
        ("", {"sample_rate": 0.0}, "not_sampled"),
    ],
)
async def test_with_capture_off_bytes_pass_as_they_came_both_ways(
    headers: str,
    capture: dict[str, Any],
    reason: str,
    recorded: Recorded,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
) -> None:
    reply = recorded("two_reply_asked.json")
    fake_vllm.script = lambda _: [wire.whole_reply(reply)]
    running = await start_proxy(capture=capture)

    _, _, body = wire.split(await running.send(wire.post(REQUEST, headers=headers)))

    assert (body, fake_vllm.requests[0].body) == (reply, REQUEST)
    assert running.metric("sidecar_captures_skipped_total", reason=reason) == 1
    assert running.sink.exchanges == []


async def test_what_the_client_asked_for_stays(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    reply = recorded("two_reply_asked.json")
    fake_vllm.script = lambda _: [wire.whole_reply(reply)]
    running = await start_proxy()
    request = REQUEST[:-1] + b',"logprobs":true,"return_token_ids":true}'

    _, _, body = wire.split(await running.send(wire.post(request)))

    assert (body, fake_vllm.requests[0].body) == (reply, request)
    assert len((await running.captured(1))[0].choices) == 2


async def test_the_first_event_goes_on_before_the_second_exists(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    events = recorded("whole_stream_asked.sse").split(b"\n\n")[:-1]
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [
        wire.STREAM_HEAD,
        wire.chunk(events[0] + b"\n\n"),
        go_on,
        *(wire.chunk(event + b"\n\n") for event in events[1:]),
        wire.LAST_CHUNK,
    ]
    running = await start_proxy()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(wire.post(REQUEST))

    async with asyncio.timeout(60):
        first = await reader.readuntil(b"\n\n\r\n")
    assert not go_on.is_set()
    assert b'"delta":{"role":"assistant","content":""}' in first
    go_on.set()

    assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def test_every_cut_of_the_upstreams_bytes_gives_the_same_reply(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    sent = wire.STREAM_HEAD + wire.chunk(recorded("whole_stream_asked.sse")) + wire.LAST_CHUNK
    plain = recorded("whole_stream_plain.sse")
    running = await start_proxy()
    for cut in range(1, len(sent), 37):
        fake_vllm.play(sent[:cut], sent[cut:])

        _, _, body = wire.split(await running.send(wire.post(REQUEST)))

        assert body == plain, cut


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


async def test_a_changed_table_is_obeyed_by_the_next_request(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    await running.send(wire.post(REQUEST))

    running.proxy.routing.table = RoutingTable(
        model="smollm2-135m", champion="smollm2-135m--v1", generation=1
    )
    _, headers, _ = wire.split(await running.send(wire.post(REQUEST)))

    assert headers["x-sidecar-adapter"] == "smollm2-135m--v1"
    models = [json.loads(seen.body)["model"] for seen in fake_vllm.requests]
    assert models == ["smollm2-135m", "smollm2-135m--v1"]


@pytest.mark.parametrize(
    "gone",
    [
        b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError",'
        b'"param":"model","code":404}}',
        b'{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError",'
        b'"param":null,"code":404}',
        b"404 page not found",
    ],
)
async def test_an_adapter_that_vllm_lost_is_answered_for_by_the_champion_then_the_base(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire, gone: bytes
) -> None:
    fake_vllm.script = lambda seen: [
        wire.whole_reply(gone, "404 Not Found")
        if b'"model":"smollm2-135m--' in seen.body
        else wire.whole_reply(recorded("whole_reply_asked.json"))
    ]
    running = await start_proxy()
    running.proxy.routing.table = RoutingTable(
        model="smollm2-135m",
        champion="smollm2-135m--v1",
        canary="smollm2-135m--v2",
        canary_weight_bp=10_000,
        generation=1,
    )

    line, headers, body = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, body) == ("HTTP/1.1 200 OK", recorded("whole_reply_plain.json"))
    assert headers["x-sidecar-adapter"] == "base"
    models = [json.loads(seen.body)["model"] for seen in fake_vllm.requests]
    assert models == ["smollm2-135m--v2", "smollm2-135m--v1", "smollm2-135m"]
    for adapter in models[:2]:
        assert running.metric("sidecar_adapter_missing_total", adapter=adapter) == 1
    exchange = (await running.captured(1))[0]
    assert (exchange.adapter, exchange.untrainable_reason) == ("base", None)


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


async def test_a_reply_under_another_name_must_not_be_learned_from(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    running = await start_proxy()
    running.proxy.routing.table = RoutingTable(model="smollm2-135m", champion="a", generation=1)

    await running.send(wire.post(REQUEST))

    exchange = (await running.captured(1))[0]
    assert (exchange.adapter, exchange.untrainable_reason) == ("a", "model_mismatch")
    assert running.metric("sidecar_model_mismatch_total") == 1


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
