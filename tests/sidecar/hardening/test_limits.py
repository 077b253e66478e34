"""What one client may take of the relay: time, connections, requests at once, memory. Waits are for
what happens, never for a time to pass; limits are small, and what must not happen within them is
given many times the limit."""

from __future__ import annotations

import asyncio
import socket
from time import perf_counter

import pytest

from sidecar.relay.client import ClientConnection
from support.proxy_kit import StartProxy
from support.strict_peers import REQUEST, Connect, Dial, StrictVllm, Tools, other_end, post

LONG_S = 30.0
"""A limit that a test must not run into."""


async def trickle(client: Dial, data: bytes, every_s: float) -> None:
    """Write a byte at a time until the connection is gone."""
    for at in range(len(data)):
        if client.writer.is_closing():
            return
        client.say(data[at : at + 1])
        await asyncio.sleep(every_s)


async def test_many_slow_heads_are_ended_and_neighbours_are_served(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """Slow loris: 100 connections, each a byte now and then, never silent long enough for idle."""
    running = await start_proxy(proxy={"head_timeout_s": 0.4, "idle_timeout_s": LONG_S})
    clients = [await dial(running) for _ in range(100)]
    slow = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 1000
    tasks = [asyncio.create_task(trickle(client, slow, 0.05)) for client in clients]

    neighbour = await dial(running)
    for _ in range(20):
        neighbour.say(post())
        assert (await neighbour.hear()).status == 200
    replies = [await client.hear() for client in clients]

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {reply.status for reply in replies} == {408}
    assert {reply.header(b"connection") for reply in replies} == {b"close"}
    assert len(fake_vllm.requests) == 20
    assert running.metric("sidecar_requests_total", status="408") == 100


async def test_a_body_that_stands_still_is_ended(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy(proxy={"body_timeout_s": 0.2, "idle_timeout_s": LONG_S})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for sent in (post()[:-1], head + b"26\r\n{", head):
        client = await dial(running)
        client.say(sent)

        reply = await client.hear()

        assert (reply.status, reply.header(b"connection")) == (408, b"close")
        assert await client.closed()
    assert fake_vllm.requests == []


async def test_a_connection_for_which_all_others_are_at_work_is_closed(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    go_on = asyncio.Event()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    fake_vllm.script = lambda _: [go_on, answer]
    running = await start_proxy(proxy={"max_connections": 3})
    held = [await dial(running) for _ in range(3)]
    for client in held[:2]:
        client.say(post())
    head, body = post().split(b"{", 1)
    held[2].say(head + b"{")  # the rest of its body is on its way
    await fake_vllm.asked(2)

    more = await dial(running)
    more.say(post())
    assert await more.hear_or_end() is None

    held[2].say(body)
    go_on.set()
    assert [(await client.hear()).status for client in held] == [200] * 3
    assert running.metric("sidecar_clients_cut_total", reason="too_many") == 1
    assert running.metric("sidecar_clients_cut_total", reason="made_room") == 0


async def test_the_connection_that_was_idle_longest_makes_room(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy(proxy={"max_connections": 3})
    held = [await dial(running) for _ in range(3)]
    for client in (held[1], held[0], held[2]):
        client.say(post())
        assert (await client.hear()).status == 200

    more = await dial(running)
    more.say(post())

    assert (await more.hear()).status == 200
    assert await held[1].closed()
    for client in (held[0], held[2]):
        client.say(post())
        assert (await client.hear()).status == 200
    assert running.metric("sidecar_clients_cut_total", reason="made_room") == 1


@pytest.mark.parametrize("sent", [b"", post()[:30], post()[: -len(REQUEST)]], ids=len)
async def test_a_flood_that_asks_nothing_displaces_itself_and_no_client(
    sent: bytes, start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """Ten times as many connections as may be open: silent, with half a head, with no body."""
    running = await start_proxy(proxy={"max_connections": 20})
    kept = await dial(running)
    kept.say(post())
    assert (await kept.hear()).status == 200

    flood = []
    for _ in range(10):
        for _ in range(20):
            flood.append(await dial(running))
            flood[-1].say(sent)
        kept.say(post())
        assert (await kept.hear()).status == 200
        new = await dial(running)
        new.say(post())
        assert (await new.hear()).status == 200

    assert len(fake_vllm.requests) == 21
    assert running.metric("sidecar_clients_cut_total", reason="too_many") == 0


async def test_a_client_whose_bytes_are_not_read_yet_is_not_idle(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """The relay accepts many connections before it reads what the first of them sent."""
    running = await start_proxy(proxy={"max_connections": 1})
    first = await dial(running)
    first.say(post())
    connection = next(iter(running.proxy._relay._connections))
    assert connection.idle_s(perf_counter()) >= 0
    with other_end(first.writer) as sock:
        while not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            pass

        assert not connection.make_room()

    assert (await first.hear()).status == 200


async def test_no_limit_ends_a_connection_that_is_accepted_and_not_made_yet(
    start_proxy: StartProxy, fake_vllm: StrictVllm
) -> None:
    """A busy loop may check the limits between the two; nothing could be closed then."""
    relay = (await start_proxy()).proxy._relay
    ours, theirs = socket.socketpair()
    accepted = relay._accept()
    assert isinstance(accepted, ClientConnection)

    accepted.tick(perf_counter() + 1e6)

    await asyncio.get_running_loop().create_connection(lambda: accepted, sock=theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    client = Dial(reader, writer)
    client.say(post())
    assert (await client.hear()).status == 200
    client.hang_up()


async def test_a_client_that_never_reads_is_cut_and_counted(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    event = b"data: " + b"x" * 60_000 + b"\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    fake_vllm.script = lambda _: [head, *[chunk] * 1000, b"0\r\n\r\n"]
    running = await start_proxy(proxy={"write_timeout_s": 0.3, "idle_timeout_s": LONG_S})
    client = await dial(running, limit=1024)

    client.say(post())

    async with asyncio.timeout(60):
        await fake_vllm.client_left.wait()  # vLLM need not write for nobody
    await running.metric_reaches(1, "sidecar_requests_total", status="499")
    assert fake_vllm.written_bytes < 30_000_000


async def test_a_connection_that_is_to_close_does_not_wait_for_ever_for_its_client(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm, tools: Tools
) -> None:
    """Less is left than the mark at which writing is paused, so nobody waits for the client to
    read, but for the connection to close: such a one must not hold its place for ever."""
    size = 20_000
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    fake_vllm.script = lambda _: [reply]
    running = await start_proxy(
        proxy={"write_timeout_s": 0.3, "idle_timeout_s": 3.0}, capture={"sample_rate": 0.0}
    )
    client = await dial(running, limit=1024)
    client.pause_reading()
    with tools.other_end(client.writer) as there:
        here = client.writer.get_extra_info("socket")
        answered = 0
        while tools.in_kernel(here, there) >= answered * size:  # until some is left in the relay
            client.say(post())
            answered += 1
            async with asyncio.timeout(60):
                while running.metric("sidecar_requests_total", status="200") < answered:
                    await asyncio.sleep(0.001)

    async with asyncio.timeout(60):
        while True:
            try:
                tools.other_end(client.writer).close()
            except LookupError:
                break
            await asyncio.sleep(0.02)


async def test_a_client_that_reads_slowly_is_not_cut(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """As long as it takes some bytes within the limit, it gets all of them."""
    body = b"x" * 20_000_000
    fake_vllm.script = lambda _: [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body),
        body,
    ]
    running = await start_proxy(proxy={"write_timeout_s": 30.0}, capture={"sample_rate": 0.0})
    client = await dial(running, limit=1024)
    client.say(post())
    received = pauses = unsent = 0
    running.proxy._relay._ticking.cancel()  # type: ignore[union-attr]  # time is the test's
    now = perf_counter()
    while received < len(body):
        data = await client.reader.read(1_000_000)
        assert data, f"cut after {received} bytes"
        received += len(data)
        [relays] = running.proxy._relay._connections
        assert relays._transport is not None
        left = relays._transport.get_write_buffer_size()
        if relays._writing_paused and unsent != left:
            unsent = left
            now += 20.0
            relays.tick(now)
            pauses += 1
    assert pauses > 2
