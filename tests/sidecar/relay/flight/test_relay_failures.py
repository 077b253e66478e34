"""Bad days: vLLM away, gone in the middle, stale; the client gone, slow; the capture full."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from support.fake_vllm import FakeVllm, Step
from support.proxy_kit import StartProxy, Wire

REQUEST = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}]}'
Recorded = Callable[[str], bytes]


async def test_a_dead_kept_connection_is_replaced_unseen(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    """The server dies with the request in hand, as one does whose idle timer fires just then."""
    plays: Iterator[Sequence[Step]] = iter(
        [[wire.whole_reply(b"{}")], [wire.RESET], [wire.whole_reply(b'{"a":1}')]]
    )
    fake_vllm.script = lambda _: next(plays)
    running = await start_proxy()
    await running.send(wire.post(REQUEST))

    line, _, body = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, body) == ("HTTP/1.1 200 OK", b'{"a":1}')
    assert [seen.connection for seen in fake_vllm.requests] == [1, 1, 2]
    assert running.metric("sidecar_upstream_retries_total") == 1


async def test_a_request_that_fails_on_a_new_connection_is_not_sent_again(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.RESET]
    running = await start_proxy(capture={"sample_rate": 0.0})

    line, _, _ = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, len(fake_vllm.requests)) == ("HTTP/1.1 502 Bad Gateway", 1)


async def test_nothing_is_sent_again_after_the_first_byte(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    plays: Iterator[Sequence[Step]] = iter(
        [[wire.whole_reply(b"{}")], [b"HTTP/1.1 200 OK\r\n", wire.RESET]]
    )
    fake_vllm.script = lambda _: next(plays)
    running = await start_proxy(capture={"sample_rate": 0.0})
    await running.send(wire.post(REQUEST))

    line, _, _ = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, len(fake_vllm.requests)) == ("HTTP/1.1 502 Bad Gateway", 2)
    assert running.metric("sidecar_upstream_retries_total") == 0


async def test_vllm_away_gives_502_that_says_what_to_check(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    await fake_vllm.stop()
    sent = wire.post(REQUEST, headers="Authorization: Bearer secret-key\r\n")

    line, headers, body = wire.split(await running.send(sent))

    error = json.loads(body)["error"]
    assert line == "HTTP/1.1 502 Bad Gateway"
    assert (error["type"], error["code"]) == ("BadGatewayError", 502)
    assert f"http://127.0.0.1:{fake_vllm.port}" in error["message"]
    assert "Check that vLLM is running" in error["message"]
    assert b"secret" not in body
    assert headers["x-sidecar-adapter"] == "base"
    exchange = (await running.captured(1))[0]
    assert (exchange.status, exchange.outcome, exchange.choices) == (502, "upstream_error", ())


async def test_a_file_too_few_of_our_own_gives_503_and_is_no_fault_of_vllms(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_proxy()
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def refuse(make: Any, host: str, port: int, **more: Any) -> Any:
        if port == fake_vllm.port:
            raise OSError(errno.EMFILE, "Too many open files")
        return await connect(make, host, port, **more)

    monkeypatch.setattr(loop, "create_connection", refuse)
    replies = [wire.split(await running.send(wire.post(REQUEST))) for _ in range(5)]

    assert {line for line, _, _ in replies} == {"HTTP/1.1 503 Service Unavailable"}
    assert b"Too many open files in the sidecar itself" in replies[0][2]
    url = f"http://127.0.0.1:{fake_vllm.port}"
    assert running.metric("sidecar_replica_ejections_total", replica=url) == 0


async def test_a_held_reply_that_breaks_is_asked_for_plainly_and_then_breaks_as_vllms(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    whole = wire.whole_reply(recorded("whole_reply_asked.json"))
    fake_vllm.script = lambda _: [whole[:-20], wire.CLOSE]
    running = await start_proxy()

    line, headers, body = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, len(fake_vllm.requests)) == ("HTTP/1.1 200 OK", 2)
    assert len(body) == int(headers["content-length"]) - 20
    assert (await running.captured(1))[0].outcome == "upstream_error"


@pytest.mark.parametrize("status", ["500 Internal Server Error", "400 Bad Request"])
async def test_an_error_of_vllm_is_passed_on_and_only_its_own_fault_is_recorded(
    status: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    body = b'{"error":{"message":"boom","type":"x","param":null,"code":1}}'
    fake_vllm.script = lambda _: [wire.whole_reply(body, status)]
    running = await start_proxy()

    line, _, received = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, received) == (f"HTTP/1.1 {status}", body)
    if status[0] == "5":
        exchange = (await running.captured(1))[0]
        assert (exchange.status, exchange.outcome) == (500, "upstream_error")
    else:
        assert running.metric("sidecar_captures_skipped_total", reason="not_200") == 1


@pytest.mark.parametrize("stage", ["before the reply", "in the stream"])
async def test_a_client_that_leaves_ends_vllms_work_at_once(
    stage: str, recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    events = recorded("whole_stream_asked.sse").split(b"\n\n")[:2]
    started = [wire.STREAM_HEAD, *(wire.chunk(event + b"\n\n") for event in events)]
    never = asyncio.Event()
    fake_vllm.script = lambda _: [*(started if stage == "in the stream" else []), never]
    running = await start_proxy()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(wire.post(REQUEST))
    async with asyncio.timeout(60):
        if stage == "in the stream":
            await reader.readuntil(b'"content":')
        else:
            await fake_vllm.asked()

    writer.close()

    async with asyncio.timeout(60):
        await fake_vllm.client_left.wait()
    exchange = (await running.captured(1))[0]
    assert (exchange.outcome, exchange.untrainable_reason) == ("cut", "cut")
    assert running.metric("sidecar_requests_total", status="499") == 1


async def test_a_client_that_leaves_at_done_has_had_its_answer(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    """The openai client closes there, and does not wait for the last chunk of the framing."""
    never = asyncio.Event()
    stream = recorded("whole_stream_asked.sse")
    fake_vllm.script = lambda _: [wire.STREAM_HEAD, wire.chunk(stream), never]
    running = await start_proxy()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(wire.post(REQUEST))
    async with asyncio.timeout(60):
        await reader.readuntil(b"data: [DONE]\n\n")

    writer.close()

    exchange = (await running.captured(1))[0]
    assert (exchange.outcome, exchange.untrainable_reason) == ("ok", None)


async def test_a_reply_too_long_to_keep_is_still_relayed_stripped_and_counted(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    running = await start_proxy(capture={"max_reply_bytes": 1000})

    _, _, body = wire.split(await running.send(wire.post(REQUEST)))

    assert body == recorded("whole_reply_plain.json")
    assert running.metric("sidecar_captures_lost_total", reason="reply_too_long") == 1
    assert running.sink.exchanges == []
