"""The application behind the relay, asked through it."""

from __future__ import annotations

import json

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire


def _get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


async def test_health_is_the_processs_own_and_a_head_leaves_the_connection_usable(
    fake_vllm: FakeVllm, start_proxy: StartProxy
) -> None:
    running = await start_proxy()
    await fake_vllm.stop()
    head = b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n"

    received = await running.send(head + _get("/healthz"))

    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.count(b'{"status":"ok"}') == 1
    assert b"x-sidecar-adapter" not in received


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


@pytest.mark.parametrize("data", [b"null", b'[null,3,"smollm2-135m"]'])
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


async def test_a_model_list_that_vllm_refuses_is_refused_the_same_way_and_without_vllm_502(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(b'{"error":"Unauthorized"}', "401 Unauthorized")]
    running = await start_proxy()

    line, _, body = wire.split(await running.send(_get("/v1/models")))
    await fake_vllm.stop()
    away, _, _ = wire.split(await running.send(_get("/v1/models")))

    assert (line, json.loads(body)) == ("HTTP/1.1 401 Unauthorized", {"error": "Unauthorized"})
    assert away == "HTTP/1.1 502 Bad Gateway"


async def test_metrics_are_served_for_prometheus(start_proxy: StartProxy, wire: Wire) -> None:
    running = await start_proxy()

    _, headers, body = wire.split(await running.send(_get("/metrics")))

    assert headers["content-type"].startswith("text/plain")
    assert b"sidecar_captures_kept_total 0.0" in body
    assert b"sidecar_proxy_overhead_seconds_bucket" in body
