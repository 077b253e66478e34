"""What a hostile or clumsy client may send, and what it must not achieve."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

REQUEST = b'{"model":"smollm2-135m","messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
        HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
        HEAD + b"Content-Length: +2\r\n\r\n{}",
        HEAD + b"Content-Length: 0x2\r\n\r\n{}",
        HEAD + b"Content-Length: -2\r\n\r\n{}",
        HEAD + b"Content-Length : 2\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        HEAD + b"X-A: 1\r\n folded\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X-A: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 2\nX: y\r\n\r\n{}",
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_ambiguous_framing_is_refused_and_nothing_behind_it_is_read(
    sent: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    received = await running.send(sent + SMUGGLED)

    line, headers, body = wire.split(received)
    assert line == "HTTP/1.1 400 Bad Request"
    assert headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == 400
    assert received.count(b"HTTP/1.1 ") == 1
    assert fake_vllm.requests == []


async def test_chunked_bodies_are_read_at_every_cut(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy(capture={"sample_rate": 0.0})
    sent = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    sent += b"a;ext=1\r\n" + REQUEST[:10] + b"\r\n1c\r\n" + REQUEST[10:] + b"\r\n0\r\nT: 1\r\n\r\n"
    for cut in range(1, len(sent), 5):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(sent[:cut])
        await asyncio.sleep(0)
        writer.write(sent[cut:])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    assert {seen.body for seen in fake_vllm.requests} == {REQUEST}
    assert "t" not in fake_vllm.requests[0].headers


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/sleep", "/v1/chat/completions/x"])
async def test_a_path_that_is_not_allowed_is_never_relayed(
    path: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, body = wire.split(await running.send(wire.post(b"{}", path=path)))

    assert line == "HTTP/1.1 404 Not Found"
    assert body == (
        b'{"error":{"message":"Not Found","type":"NotFoundError","param":null,"code":404}}'
    )
    assert fake_vllm.requests == []


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

    assert line == "HTTP/1.1 413 Request Entity Too Large"
    assert b"proxy.max_body_bytes (1000)" in body
    assert fake_vllm.requests == []


async def test_chunk_headers_do_not_grow_without_end(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy(proxy={"max_body_bytes": 1000})
    sent = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 70_000

    line, _, _ = wire.split(await running.send(sent))

    assert line == "HTTP/1.1 400 Bad Request"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 70_000,
        b"GET /" + b"a" * 70_000,
        b"GET /healthz HTTP/1.1\r\n" + b"X: 1\r\n" * 129 + b"\r\n",
    ],
)
async def test_a_head_over_the_limit_is_refused(
    sent: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, _ = wire.split(await running.send(sent))

    assert line == "HTTP/1.1 431 Request Header Fields Too Large"


async def test_a_client_that_waits_for_100_is_told_to_go_on(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    sent = wire.post(REQUEST, headers="Expect: 100-continue\r\n")
    head, _, body = sent.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(60):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"

    writer.write(body)

    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    assert "expect" not in fake_vllm.requests[0].headers
    writer.close()


async def test_a_client_that_waits_for_100_with_a_body_too_large_is_refused_before_it_sends(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy(proxy={"max_body_bytes": 10})

    received = await running.send(HEAD + b"Content-Length: 11\r\nExpect: 100-continue\r\n\r\n")

    assert received.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHo", b"HTTP/1.1 408 Request Timeout"),
        (HEAD + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408 Request Timeout"),
    ],
)
async def test_a_connection_on_which_nothing_happens_is_closed(
    sent: bytes, status: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy
) -> None:
    running = await start_proxy(
        proxy={"idle_timeout_s": 0.05, "head_timeout_s": 0.05, "body_timeout_s": 0.05}
    )

    async with asyncio.timeout(60):
        received = await running.send(sent)

    assert received.partition(b"\r\n")[0] == status


async def test_a_head_that_trickles_in_does_not_hold_a_connection_open(
    fake_vllm: FakeVllm, start_proxy: StartProxy
) -> None:
    running = await start_proxy(proxy={"head_timeout_s": 0.2})
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)

    async def trickle() -> None:
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        while True:
            writer.write(b"X: 1\r\n")
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(60):
        received = await reader.read()
    trickling.cancel()

    assert received.startswith(b"HTTP/1.1 408 ")
    writer.close()


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
