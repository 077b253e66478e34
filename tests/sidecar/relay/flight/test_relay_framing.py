"""What a hostile or clumsy client may send, and what it must not achieve."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

REQUEST = b'{"model":"smollm2-135m","messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"", "not_an_object"), (b"[1]", "not_an_object"), (b'{"model":', "not_json")],
)
async def test_a_body_that_is_no_object_is_refused_counted_and_not_recorded(
    body: bytes, reason: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, reply = wire.split(await running.send(wire.post(body)))

    assert line == "HTTP/1.1 400 Bad Request"
    assert json.loads(reply)["error"]["type"] == "Bad Request"
    assert fake_vllm.requests == []
    assert running.metric("sidecar_exchanges_total", outcome="ok") == 0
    assert running.metric("sidecar_requests_total", status="400") == 1
    assert running.metric("sidecar_bodies_unreadable_total", reason=reason) == 1


async def test_a_model_that_is_no_text_is_left_for_vllm_to_refuse(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    await running.send(wire.post(b'{"model":3}'))

    assert fake_vllm.requests[0].body == b'{"model":3}'


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
