"""The end of a proxy, by the signal that init systems send: nobody is cut before the deadline."""

from __future__ import annotations

import asyncio
import signal

import pytest

from support.proxy_kit import StartProcess
from support.strict_peers import Connect, StrictVllm, post

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST = b"9\r\ndata: 1\n\n\r\n"
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def refused(port: int) -> None:
    """Wait until new connections are refused."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0.01)


async def test_a_pipelined_request_behind_the_last_reply_is_answered_whole_or_not_begun(
    start_process: StartProcess, dial: Connect, fake_vllm: StrictVllm
) -> None:
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [STREAM + FIRST, go_on, LAST]
    child = await start_process(proxy={"drain_timeout_s": 60.0})
    client = await dial(child)
    client.say(post() * 2)
    await client.reader.readuntil(FIRST)
    child.process.send_signal(signal.SIGTERM)
    await refused(child.port)

    go_on.set()

    received = await client.reader.read()
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")  # whatever stands in that chunk
    assert len(fake_vllm.requests) == 1 + received.count(b"HTTP/1.1 200 OK")
    assert await asyncio.wait_for(child.process.wait(), 60) == 0


async def test_what_does_not_end_is_cut_at_the_deadline_and_recorded(
    start_process: StartProcess, dial: Connect, fake_vllm: StrictVllm
) -> None:
    never = asyncio.Event()
    fake_vllm.script = lambda _: [STREAM + FIRST, never]
    child = await start_process(proxy={"drain_timeout_s": 0.3})
    client = await dial(child)
    client.say(post())
    await client.reader.readuntil(FIRST)

    child.process.send_signal(signal.SIGTERM)

    assert await asyncio.wait_for(child.process.wait(), 60) == 0
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.reader.readexactly(1)
    assert any("requests_cut_at_drain_deadline" in line for line in child.lines)
    async with asyncio.timeout(60):
        await fake_vllm.client_left.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_break_the_end(
    number: signal.Signals, start_process: StartProcess, dial: Connect, fake_vllm: StrictVllm
) -> None:
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [STREAM + FIRST, go_on, LAST]
    child = await start_process(proxy={"drain_timeout_s": 60.0})
    client = await dial(child)
    client.say(post())
    await client.reader.readuntil(FIRST)
    child.process.send_signal(number)
    await refused(child.port)

    child.process.send_signal(number)
    go_on.set()

    assert (await client.reader.read()).endswith(LAST)
    assert await asyncio.wait_for(child.process.wait(), 60) == 0
