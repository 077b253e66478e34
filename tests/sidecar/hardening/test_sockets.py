"""The options of the relay's real sockets, looked up in the kernel."""

from __future__ import annotations

import asyncio
import socket

from support.proxy_kit import StartProxy
from support.strict_peers import REQUEST, Connect, StrictVllm, Tools, post


async def test_small_pieces_are_sent_at_once_on_both_sides(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm, tools: Tools
) -> None:
    """Without TCP_NODELAY a token waits for the acknowledgement of the one before it: 40 ms."""
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [go_on, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]
    running = await start_proxy()
    client = await dial(running)
    client.say(post())
    await fake_vllm.asked()

    sockets = tools.own_sockets()
    to_clients = [sock for ((_, port), _), sock in sockets if port == running.port]
    to_vllm = [sock for (_, (_, port)), sock in sockets if port == fake_vllm.port]

    asked = [(item, socket.IPPROTO_TCP, socket.TCP_NODELAY) for item in to_clients + to_vllm]
    assert [item.getsockopt(level, name) != 0 for item, level, name in asked] == [True] * len(asked)
    assert (len(to_clients), len(to_vllm)) >= (1, 1)
    for _, sock in sockets:
        sock.close()
    go_on.set()
    assert (await client.hear()).status == 200


async def test_no_connection_is_left_behind(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm, tools: Tools
) -> None:
    """After 60 clients that came and went in all manners, the relay holds none of their sockets."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    for sent in (b"", b"POST", b"rubbish\r\n\r\n", post()[: -len(REQUEST)], post(), post() * 2):
        for number in range(10):
            client = await dial(running)
            client.say(sent)
            if sent.endswith(REQUEST) and number % 2:
                await client.hear()
            client.hang_up()

    async with asyncio.timeout(60):
        while True:
            sockets = tools.own_sockets()
            held = [port for ((_, port), _), _ in sockets if port == running.port]
            for _, sock in sockets:
                sock.close()
            if not held:
                break
            await asyncio.sleep(0.01)
    assert running.metric("sidecar_requests_in_flight") == 0
