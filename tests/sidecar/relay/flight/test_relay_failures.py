"""Bad days: vLLM away, gone in the middle, stale; the client gone, slow; the capture full."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sidecar.capture.outbox import Outbox
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


async def test_vllm_back_is_used_without_a_restart(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    await fake_vllm.stop()
    await running.send(wire.post(REQUEST))

    await fake_vllm.start(fake_vllm.port)
    line, _, _ = wire.split(await running.send(wire.post(REQUEST)))

    assert line == "HTTP/1.1 200 OK"


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


async def test_an_error_of_vllm_is_passed_on_and_recorded_as_its_error(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    body = b'{"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}'
    fake_vllm.script = lambda _: [wire.whole_reply(body, "500 Internal Server Error")]
    running = await start_proxy()

    line, _, received = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, received) == ("HTTP/1.1 500 Internal Server Error", body)
    exchange = (await running.captured(1))[0]
    assert (exchange.status, exchange.outcome) == (500, "upstream_error")


async def test_a_refused_request_is_not_recorded(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    body = b'{"error":{"message":"n must be 1","type":"BadRequestError","param":null,"code":400}}'
    fake_vllm.script = lambda _: [wire.whole_reply(body, "400 Bad Request")]
    running = await start_proxy()

    line, _, received = wire.split(await running.send(wire.post(REQUEST)))

    assert (line, received) == ("HTTP/1.1 400 Bad Request", body)
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
            while not fake_vllm.requests:
                await asyncio.sleep(0.001)

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


async def test_a_slow_client_holds_a_bounded_buffer(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    event = wire.chunk(b"data: " + b"x" * 8192 + b"\n\n")
    fake_vllm.script = lambda _: [wire.STREAM_HEAD, *([event] * 4000), wire.LAST_CHUNK]
    running = await start_proxy(capture={"sample_rate": 0.0})
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=4096)
    writer.write(wire.post(REQUEST))
    await reader.readuntil(b"\r\n\r\n")

    stalled_at = await _settled(lambda: fake_vllm.written_bytes)
    # 32 MB wait; what has left vLLM stands in socket buffers (about 6 MB each on Linux) and in
    # less than 1 MB of the relay's.
    assert stalled_at < 20_000_000
    received = 0
    while data := await reader.read(1 << 20):
        received += len(data)

    assert received > 4000 * 8192
    writer.close()


async def _settled(value: Callable[[], int]) -> int:
    """The value once it has stood still for a fifth of a second."""
    last = -1
    while (now := value()) != last:
        last = now
        await asyncio.sleep(0.2)
    return last


async def test_a_reply_too_long_to_keep_is_still_relayed_stripped_and_counted(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    running = await start_proxy(capture={"max_reply_bytes": 1000})

    _, _, body = wire.split(await running.send(wire.post(REQUEST)))

    assert body == recorded("whole_reply_plain.json")
    assert running.metric("sidecar_captures_lost_total", reason="reply_too_long") == 1
    assert running.sink.exchanges == []


async def test_a_full_queue_drops_the_newest_counts_it_and_lets_requests_flow(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    running = await start_proxy(capture={"max_pending": 2, "flush_interval_s": 600.0})
    running.sink.go_on.clear()

    replies = [await running.send(wire.post(REQUEST)) for _ in range(3)]
    assert await asyncio.to_thread(running.sink.writing.wait, 5)  # the full queue woke the thread
    replies += [await running.send(wire.post(REQUEST)) for _ in range(4)]

    assert [reply[:15] for reply in replies] == [b"HTTP/1.1 200 OK"] * 7
    assert running.metric("sidecar_captures_lost_total", reason="queue_full") == 3
    running.sink.go_on.set()
    await running.metric_reaches(4, "sidecar_captures_kept_total")


@pytest.mark.parametrize("reason", ["locked", "disk_full", "read_only", "unreachable"])
async def test_an_outbox_that_refuses_costs_captures_and_no_requests(
    reason: str, recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    sink = wire.Sink()
    sink.fail_with = reason
    running = await start_proxy(sink=sink)

    for _ in range(3):
        assert (await running.send(wire.post(REQUEST))).startswith(b"HTTP/1.1 200 OK")
    await running.metric_reaches(3, "sidecar_captures_lost_total", reason=reason)

    sink.fail_with = None
    await running.send(wire.post(REQUEST))
    await running.metric_reaches(1, "sidecar_captures_kept_total")


async def test_requests_flow_while_the_real_outbox_is_locked_or_deleted(
    recorded: Recorded, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire, tmp_path: Path
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("whole_reply_asked.json"))]
    path = tmp_path / "bus" / "outbox.db"
    running = await start_proxy(sink=Outbox(path, max_rows=100, busy_timeout_s=0.01))
    await running.send(wire.post(REQUEST))
    await running.metric_reaches(1, "sidecar_captures_kept_total")

    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    assert (await running.send(wire.post(REQUEST))).startswith(b"HTTP/1.1 200 OK")
    await running.metric_reaches(1, "sidecar_captures_lost_total", reason="locked")
    locker.execute("ROLLBACK")
    locker.close()

    shutil.rmtree(path.parent)
    assert (await running.send(wire.post(REQUEST))).startswith(b"HTTP/1.1 200 OK")
    await running.metric_reaches(2, "sidecar_captures_kept_total")


async def test_a_reply_in_flight_finishes_when_the_proxy_stops(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [
        wire.STREAM_HEAD,
        wire.chunk(b"data: 1\n\n"),
        go_on,
        wire.LAST_CHUNK,
    ]
    running = await start_proxy(capture={"sample_rate": 0.0}, proxy={"drain_timeout_s": 5.0})
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(wire.post(REQUEST, close=False))
    await reader.readuntil(b"data: 1")
    idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", running.port)
    await asyncio.sleep(0)

    stopping = asyncio.create_task(running.proxy._relay.stop(5.0))
    assert await idle_reader.read() == b""
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", running.port)
    go_on.set()

    assert (await reader.read()).endswith(b"0\r\n\r\n")
    await stopping
    writer.close()
    idle_writer.close()
