"""What is written past the transport arrives whole and in order, whatever the client's pace."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from sidecar.relay.http1.direct_write import Outlet

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
BUFFER = 8_192


class Server(asyncio.Protocol):
    """The relay's end of one connection."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.connected = asyncio.Event()
        self.lost = asyncio.Event()
        self.paused = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self.connected.set()

    def pause_writing(self) -> None:
        self.paused += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Server, socket.socket]]:
    """A connection's protocol and its client's socket, which does not read by itself."""
    server = Server()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: server, "127.0.0.1", 0)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    client.setblocking(False)
    try:
        await loop.sock_connect(client, listener.sockets[0].getsockname())
        await server.connected.wait()
        yield server, client
    finally:
        client.close()
        if server.transport is not None:
            server.transport.abort()
        listener.close()


async def read(client: socket.socket, length: int) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < length:
        more = await asyncio.wait_for(loop.sock_recv(client, length - len(got)), 60)
        if not more:
            break
        got += more
    return got


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    def run_it(work: Any) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work)

    return run_it


Run = Callable[[Any], None]


def test_it_is_sent_before_the_turn_ends(run: Run) -> None:
    async def work() -> None:
        async with connected() as (server, client):
            outlet = Outlet(server.transport)

            outlet.write_now(b"event")

            assert client.recv(100) == b"event"

    run(work())


def test_it_comes_behind_what_the_transport_still_has(run: Run) -> None:
    async def work() -> None:
        async with connected() as (server, client):
            outlet = Outlet(server.transport)
            outlet.writelines([b"<first>"])
            outlet.write_now(b"<second>")
            assert await read(client, 15) == b"<first><second>"
            for turn in range(3):
                outlet.write(b"<head %d>" % turn)
                outlet.write_now(b"<one>")
                outlet.write_now(b"<two>")
                outlet.writelines([b"<three>", memoryview(b"<four>")])
                outlet.write_now(b"<five>")
                outlet.write(b"<end>")

                wanted = b"<head %d><one><two><three><four><five><end>" % turn
                assert await read(client, len(wanted)) == wanted
                outlet.write_now(b"<next turn>")
                assert client.recv(100) == b"<next turn>"

    run(work())


def test_what_a_slow_client_does_not_take_waits_in_the_transport(run: Run) -> None:
    events = [b"%06d:" % number + b"x" * 1_000 for number in range(2_000)]

    async def work() -> None:
        async with connected() as (server, client):
            outlet = Outlet(server.transport)
            for event in events:
                outlet.write_now(event)

            assert server.transport.get_write_buffer_size() > 0
            assert server.paused == 1
            wanted = b"".join(events)
            assert await read(client, len(wanted)) == wanted
            outlet.write_now(b"later")
            assert await read(client, 5) == b"later"

    run(work())


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_that_the_client_is_gone_is_told_by_the_transport(run: Run, leave: str) -> None:
    async def work() -> None:
        async with connected() as (server, client):
            outlet = Outlet(server.transport)
            server.transport.pause_reading()  # else that would find out
            if leave == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            for _ in range(10):
                outlet.write_now(b"event")

            await asyncio.wait_for(server.lost.wait(), 60)

    run(work())


@pytest.mark.parametrize("way", ["close", "abort", "end"])
def test_nothing_is_sent_behind_the_end(run: Run, way: str) -> None:
    async def work() -> None:
        async with connected() as (server, client):
            outlet = Outlet(server.transport)
            outlet.write_now(b"last")

            getattr(outlet, way)()
            try:
                outlet.write_now(b"too late")
            except RuntimeError:  # as the transport's own `write` behind its `write_eof`
                assert way == "end"

            assert await read(client, 100) == b"last"

    run(work())


def test_what_is_written_to_a_tls_connection_is_left_to_its_transport() -> None:
    class Encrypted(asyncio.Transport):
        def __init__(self, sock: socket.socket) -> None:
            super().__init__({"socket": sock, "sslcontext": ssl.create_default_context()})
            self.written: list[bytes] = []

        def write(self, data: Any) -> None:
            self.written.append(data)

        def get_write_buffer_size(self) -> int:
            return 0

    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = Encrypted(ours)
        outlet = Outlet(transport)

        outlet.write_now(b"one")
        outlet.write_now(b"two")

        assert transport.written == [b"one", b"two"]
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
