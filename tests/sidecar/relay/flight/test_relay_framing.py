"""What a hostile or clumsy client may send, and what it must not achieve."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

REQUEST = b'{"model":"smollm2-135m","messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b'{"model":'])
async def test_a_body_that_is_no_object_is_refused_and_not_recorded(
    body: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, reply = wire.split(await running.send(wire.post(body)))

    assert line == "HTTP/1.1 400 Bad Request"
    assert json.loads(reply)["error"]["type"] == "Bad Request"
    assert fake_vllm.requests == []
    assert running.metric("sidecar_exchanges_total", outcome="ok") == 0
    assert running.metric("sidecar_requests_total", status="400") == 1


@pytest.mark.parametrize("name", ["nope", "smollm2-135m--v1-abc", "../../etc"])
async def test_only_the_public_model_can_be_named(
    name: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, body = wire.split(
        await running.send(wire.post(json.dumps({"model": name, "messages": []}).encode()))
    )

    assert line == "HTTP/1.1 404 Not Found"
    # vLLM's own words for it.
    assert json.loads(body)["error"] == {
        "message": f"The model `{name}` does not exist. Valid aliases: smollm2-135m.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert fake_vllm.requests == []
    assert running.metric("sidecar_models_unknown_total") == 1
    assert running.metric("sidecar_exchanges_total", outcome="ok") == 0


async def test_a_model_that_is_no_text_is_left_for_vllm_to_refuse(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    await running.send(wire.post(b'{"model":3}'))

    assert fake_vllm.requests[0].body == b'{"model":3}'


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Content-Length: 1001\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001,
    ],
)
async def test_a_body_over_the_limit_is_refused(
    sent: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy(proxy={"max_body_bytes": 1000})

    line, _, body = wire.split(await running.send(sent))

    assert line == f"HTTP/1.1 413 {HTTPStatus(413).phrase}"  # other words from Python 3.13 on
    assert b"proxy.max_body_bytes (1000)" in body
    assert fake_vllm.requests == []


async def test_a_client_that_waits_for_100_with_a_body_too_large_is_refused_before_it_sends(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy(proxy={"max_body_bytes": 10})

    received = await running.send(HEAD + b"Content-Length: 11\r\nExpect: 100-continue\r\n\r\n")

    assert received.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("sent", "limit", "status"),
    [
        (b"", "idle_timeout_s", b""),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHo", "head_timeout_s", b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 100\r\n\r\n{", "body_timeout_s", b"HTTP/1.1 408 "),
    ],
)
async def test_a_connection_on_which_nothing_happens_is_closed(
    sent: bytes, limit: str, status: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy
) -> None:
    running = await start_proxy(proxy={limit: 0.05})

    async with asyncio.timeout(60):
        received = await running.send(sent)

    assert received[: len(b"HTTP/1.1 408 ")] == status


async def test_a_slow_reply_is_not_taken_for_an_idle_connection(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [go_on, wire.whole_reply(b"{}")]
    running = await start_proxy(proxy={"idle_timeout_s": 0.05, "write_timeout_s": 0.05})
    sending = asyncio.create_task(running.send(wire.post(REQUEST)))

    await asyncio.sleep(0.2)
    go_on.set()

    assert (await sending).startswith(b"HTTP/1.1 200 OK")


async def test_other_methods_on_a_model_path_are_vllms_to_answer(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    refusal = b'{"detail":"Method Not Allowed"}'
    fake_vllm.script = lambda _: [
        wire.whole_reply(refusal, "405 Method Not Allowed", "allow: POST\r\n")
    ]
    running = await start_proxy()

    sent = b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    line, headers, body = wire.split(await running.send(sent))

    assert (line, headers["allow"], body) == ("HTTP/1.1 405 Method Not Allowed", "POST", refusal)
