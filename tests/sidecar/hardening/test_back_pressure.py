"""A slow side slows the other side down; it fills no memory of the relay and holds up nobody. The
relay runs in a process of its own here, so that its memory can be measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sidecar.__main__ import KEPT_FREE_BYTES
from support.proxy_kit import StartProcess
from support.strict_peers import Connect, StrictVllm, post

MB = 1_000_000
EVENT = b"data: " + b"x" * 65_000 + b"\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
)
SMALL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def settled(value: Callable[[], int]) -> int:
    """The value once it has stood still for a fifth of a second."""
    last = -1
    while (now := value()) != last:
        last = now
        await asyncio.sleep(0.2)
    return last


async def test_a_client_that_hardly_reads_holds_a_bounded_buffer_and_neighbours_do_not_notice(
    start_process: StartProcess, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """vLLM has 200 MB for it, and 20 others go on as if it were not there."""
    chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    stream = [STREAM_HEAD + b"\r\n", *[chunk] * 3000, b"0\r\n\r\n"]
    fake_vllm.script = lambda seen: stream if b"slow" in seen.body else [SMALL]
    child = await start_process(proxy={"drain_timeout_s": 0.1})
    slow = await dial(child, limit=1024)
    before = child.resident_bytes()
    slow.say(post(b'{"model":"smollm2-135m","slow":1}'))
    assert len(await slow.reader.readexactly(1)) == 1
    held_back_at = await settled(lambda: fake_vllm.written_bytes)

    async def neighbour() -> list[int]:
        client = await dial(child)
        statuses = []
        for _ in range(20):
            client.say(post())
            statuses.append((await client.hear()).status)
        return statuses

    replies = await asyncio.gather(*(neighbour() for _ in range(20)))
    assert len(await slow.reader.readexactly(1)) == 1  # it is still there, and still reads

    assert replies == [[200] * 20] * 20
    # Socket buffers on Linux hold about 6 MB each, two of them between vLLM and the client.
    assert held_back_at < 20 * MB
    assert fake_vllm.written_bytes - held_back_at < MB
    # 8 MB are the capture's (max_reply_bytes), 64 kB the relay's, the rest the allocator's.
    assert child.resident_bytes() - before < 32 * MB
    slow.hang_up()
    async with asyncio.timeout(60):
        await fake_vllm.client_left.wait()


async def test_a_hundred_clients_that_do_not_read_hold_a_bounded_buffer_each(
    start_process: StartProcess, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """Capture off: what grows is the relay's own. 100 times 10 MB wait at vLLM."""
    body = b"x" * 10 * MB
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    fake_vllm.script = lambda _: [head, body]
    child = await start_process(capture={"sample_rate": 0.0}, proxy={"drain_timeout_s": 0.1})
    before = child.resident_bytes()
    for _ in range(100):
        client = await dial(child, limit=1024)
        client.say(post())
    await fake_vllm.asked(100)
    await settled(child.resident_bytes)

    # For each client: two reads of uvloop (256 KiB each; the unsent end of the first keeps all of
    # it), a third of some on a busy machine, and room. For all: the freed memory that malloc keeps.
    assert child.resident_bytes() - before < 100 * (3 * 2**18 + 40_000) + KEPT_FREE_BYTES


async def test_a_long_upload_to_a_vllm_that_does_not_read_is_held_once_and_let_go(
    start_process: StartProcess, dial: Connect, fake_vllm: StrictVllm
) -> None:
    child = await start_process(capture={"sample_rate": 0.0}, proxy={"drain_timeout_s": 0.1})
    body = b'{"model":"smollm2-135m","x":"' + b"a" * 30 * MB + b'"}'
    warm_up = await dial(child)
    warm_up.say(post())
    assert (await warm_up.hear()).status == 200
    before = child.resident_bytes()
    fake_vllm.reading.clear()
    client = await dial(child)
    client.say(post(body))
    async with asyncio.timeout(60):
        await client.writer.drain()
        while client.writer.transport.get_write_buffer_size():
            await asyncio.sleep(0.01)

    held = await settled(child.resident_bytes) - before
    health = await dial(child)
    health.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await health.hear(b"GET")).status == 200
    # The body itself, its edited copy, and what the sockets took: not one copy for each layer.
    assert held < 3 * len(body)

    fake_vllm.reading.set()
    assert (await client.hear()).status == 200
    assert fake_vllm.requests[-1].body == body
    # The connections stay open, on both sides, and hold nothing of what went over them.
    assert await settled(child.resident_bytes) - before < len(body) / 2
