"""The application behind the relay, asked through it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import Recorded, StartProxy, Wire


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Longer than the path of the unix socket in it may be."""
    return tmp_path / ("folder-" * 20)


def _get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


async def test_health_is_the_processs_own(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    await fake_vllm.stop()

    line, headers, body = wire.split(await running.send(_get("/healthz")))

    assert (line, body) == ("HTTP/1.1 200 OK", b'{"status":"ok"}')
    assert "x-sidecar-adapter" not in headers


async def test_a_head_request_has_no_body_and_leaves_the_connection_usable(
    start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    head = b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n"

    received = await running.send(head + _get("/healthz"))

    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.count(b'{"status":"ok"}') == 1


async def test_readiness_follows_vllm(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, body = wire.split(await running.send(_get("/readyz")))
    assert line == "HTTP/1.1 200 OK"
    assert json.loads(body) == {
        "ready": True,
        "upstreams": [{"url": f"http://127.0.0.1:{fake_vllm.port}", "reachable": True}],
        "keys_read": True,
        "routing": {"model": "smollm2-135m", "generation": 0},
    }

    await fake_vllm.stop()
    line, _, body = wire.split(await running.send(_get("/readyz")))
    assert (line, json.loads(body)["ready"]) == ("HTTP/1.1 503 Service Unavailable", False)


async def test_models_shows_the_public_name_only(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    public = {"id": "smollm2-135m", "object": "model", "owned_by": "vllm", "max_model_len": 2048}
    adapter = {"id": "smollm2-135m--v1-abc", "object": "model", "parent": "smollm2-135m"}
    cards = json.dumps({"object": "list", "data": [public, adapter]}).encode()
    fake_vllm.script = lambda _: [wire.whole_reply(cards)]
    running = await start_proxy()
    sent = _get("/v1/models").replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer k")

    _, _, body = wire.split(await running.send(sent))

    assert json.loads(body) == {"object": "list", "data": [public]}
    assert fake_vllm.requests[0].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize("data", [b"null", b"7", b'"x"', b'[null,3,"smollm2-135m"]'])
async def test_a_list_that_is_none_shows_no_model(
    data: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(b'{"object":"list","data":%b}' % data)]
    running = await start_proxy()

    line, _, body = wire.split(await running.send(_get("/v1/models")))

    assert (line, json.loads(body)) == ("HTTP/1.1 200 OK", {"object": "list", "data": []})


async def test_a_key_reaches_vllm_as_the_bytes_that_came(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    key = "Bearer Grüße".encode()
    fake_vllm.script = lambda _: [wire.whole_reply(b'{"object":"list","data":[]}')]
    running = await start_proxy()

    await running.send(_get("/v1/models").replace(b"Host: x", b"Host: x\r\nAuthorization: " + key))

    sent = fake_vllm.requests[0].headers["authorization"]
    assert key in (sent.encode("latin-1"), sent.encode("utf-8", "surrogateescape"))


async def test_a_model_list_that_vllm_refuses_is_refused_the_same_way(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(b'{"error":"Unauthorized"}', "401 Unauthorized")]
    running = await start_proxy()

    line, _, body = wire.split(await running.send(_get("/v1/models")))

    assert (line, json.loads(body)) == ("HTTP/1.1 401 Unauthorized", {"error": "Unauthorized"})


async def test_models_without_vllm_gives_502(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    await fake_vllm.stop()

    line, _, _ = wire.split(await running.send(_get("/v1/models")))

    assert line == "HTTP/1.1 502 Bad Gateway"


async def test_metrics_are_served_for_prometheus(start_proxy: StartProxy, wire: Wire) -> None:
    running = await start_proxy()

    _, headers, body = wire.split(await running.send(_get("/metrics")))

    assert headers["content-type"].startswith("text/plain")
    assert b"sidecar_captures_kept_total 0.0" in body
    assert b"sidecar_proxy_overhead_seconds_bucket" in body


async def test_the_openai_client_gets_what_vllm_sent(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    def script(seen: Any) -> list[bytes]:
        if json.loads(seen.body).get("stream"):
            stream = recorded("tools_stream_asked.sse")
            return [wire.STREAM_HEAD, wire.chunk(stream), wire.LAST_CHUNK]
        return [wire.whole_reply(recorded("whole_reply_asked.json"))]

    fake_vllm.script = script
    running = await start_proxy()
    url = f"http://127.0.0.1:{running.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        request: dict[str, Any] = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Hi"}],
        }
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        events = [event async for event in stream]

    plain = json.loads(recorded("whole_reply_plain.json"))
    assert whole.choices[0].message.content == plain["choices"][0]["message"]["content"]
    assert whole.choices[0].logprobs is None
    assert events[1].choices[0].delta.tool_calls[0].function.name == "get_weather"
    assert all(event.choices[0].logprobs is None for event in events)
    exchanges = await running.captured(2)
    assert [item.untrainable_reason for item in exchanges] == [None, None]
    assert [item.outcome for item in exchanges] == ["ok", "ok"]
