"""What the sidecar asks vLLM on its own account, against a server that plays every trick."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from sidecar.relay import watch
from sidecar.relay.watch import AGENT, VllmStatus

SILENCE = b"silence"
HANG_UP = b"hang up"
"""Close without a word."""


def reply(body: bytes = b"", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


@dataclass
class Server:
    """Answers by `script`: the question's number, from 0, to the bytes that are sent."""

    script: Callable[[int], bytes] = lambda _: reply()
    asked: list[bytes] = field(default_factory=list)
    """The heads of the questions."""
    accepted: int = 0
    left: int = 0
    """Connections that are over."""
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.script(len(self.asked) - 1)
                if answer == HANG_UP:
                    self.left += 1
                    return
                if answer != SILENCE:
                    writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        finally:
            writer.close()

    async def all_left(self) -> None:
        async with asyncio.timeout(60):
            while self.left < self.accepted:
                await asyncio.sleep(0.001)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def status(server: Server) -> AsyncIterator[VllmStatus]:
    status = VllmStatus(f"http://127.0.0.1:{server.port}")
    yield status
    await status.close()


@pytest.mark.parametrize(
    ("line", "healthy"),
    [("200 OK", True), ("503 Service Unavailable", False), ("204 No Content", False)],
)
async def test_only_200_is_healthy(
    line: str, healthy: bool, server: Server, status: VllmStatus
) -> None:
    server.script = lambda _: reply(status=line)

    assert await status.reachable() is healthy

    [asked] = server.asked
    host = f"127.0.0.1:{server.port}".encode()
    assert asked == b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"


async def test_silence_is_no_answer_and_the_connection_is_given_up(
    server: Server, status: VllmStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = lambda number: SILENCE if number < 2 else reply(b"{}")
    monkeypatch.setattr(watch, "TIMEOUT_S", 0.05)

    assert await status.reachable() is False
    assert await status.models(None) is None
    monkeypatch.setattr(watch, "TIMEOUT_S", 30.0)
    assert await status.reachable()

    assert server.accepted == 3
    await status.close()
    await server.all_left()


@pytest.mark.parametrize("again", [True, False])
async def test_a_kept_connection_that_died_is_followed_by_one_new_one(
    again: bool, server: Server, status: VllmStatus
) -> None:
    """again: the new one answers."""
    server.script = lambda number: HANG_UP if number == 1 or (number and not again) else reply()

    assert [await status.reachable() for _ in range(2)] == [True, again]

    assert (server.accepted, len(server.asked)) == (2, 3)


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_no_answer(
    said: bytes, server: Server, status: VllmStatus
) -> None:
    server.script = lambda _: said

    assert await status.reachable() is False
    assert await status.models(None) is None

    assert server.accepted == 2
    await server.all_left()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1, 2]",
        b'{"data": [',
        b'{"data": "\xff"}',
        pytest.param(b"[" * 200_000, id="deep"),
        pytest.param(b'{"data":' * 200_000, id="deep_objects"),
    ],
)
async def test_a_list_that_is_none_is_none(body: bytes, server: Server, status: VllmStatus) -> None:
    server.script = lambda _: reply(body)

    assert await status.models(None) is None

    server.script = lambda _: reply(b"{}")
    assert await status.models(None) is not None
    assert server.accepted == 1  # the reply was whole


async def test_the_authorization_that_was_given_is_sent_and_none_otherwise(
    server: Server, status: VllmStatus
) -> None:
    server.script = lambda _: reply(b"{}")

    await status.models("Bearer secret")
    await status.models(None, agent="learning-sidecar-watch")

    host = f"127.0.0.1:{server.port}"
    first = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nUser-Agent: "
    assert [asked.decode() for asked in server.asked] == [
        f"{first}{AGENT}\r\nAuthorization: Bearer secret\r\n\r\n",
        f"{first}learning-sidecar-watch\r\n\r\n",
    ]


async def test_the_path_of_the_base_url_comes_first(server: Server) -> None:
    status = VllmStatus(f"http://127.0.0.1:{server.port}/behind/")

    assert await status.reachable()
    await status.close()

    assert server.asked[0].startswith(b"GET /behind/health HTTP/1.1\r\n")


async def test_a_question_that_is_cancelled_drops_its_connection(
    server: Server, status: VllmStatus
) -> None:
    server.script = lambda _: SILENCE
    question = asyncio.create_task(status.reachable())
    async with asyncio.timeout(60):
        while not server.asked:
            await asyncio.sleep(0.001)

    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question

    await server.all_left()
