"""A vLLM that plays a script on a real socket, and the bytes that a real vLLM 0.32 sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

RECORDED = Path(__file__).resolve().parents[1] / "sidecar" / "recorded"
CLOSE = "close"
RESET = "reset"
Request = TypeVar("Request")
Step = bytes | asyncio.Event | str | float
"""What the fake does next: write these bytes, wait for this, close, reset, or wait so many
seconds."""


BACKLOG = 2048
"""Length of the accept queue, as uvicorn's: thousands of clients may come at once."""


@dataclass(frozen=True)
class Recording:
    """One request that a vLLM 0.32 got, and its reply as it stood on the wire: framing included.

    Ids and times are set to fixed values of the same length, and `connection: close` is left out.
    The files of one name are the same question: `plain` as a client asks it, `asked` with the token
    ids and log-probabilities that the sidecar asks for.
    """

    path: str
    request: bytes
    head: bytes
    """With its blank line."""
    framed: bytes
    """What follows the head on the wire."""

    @property
    def reply(self) -> bytes:
        return self.head + self.framed

    @property
    def body(self) -> bytes:
        """Without the framing."""
        return b"".join(unchunked(item) for item in self.chunks) or self.framed

    @property
    def chunks(self) -> list[bytes]:
        """The chunks of a stream as vLLM wrote them, including the empty last one."""
        if b"transfer-encoding: chunked" not in self.head:
            return []
        chunks, rest = [], self.framed
        while rest:
            size, _, _ = rest.partition(b"\r\n")
            end = len(size) + 2 + int(size, 16) + 2
            chunks.append(rest[:end])
            rest = rest[end:]
        return chunks


def unchunked(piece: bytes) -> bytes:
    return piece.partition(b"\r\n")[2][:-2]


def recording(name: str) -> Recording:
    path, request, reply = (RECORDED / "wire" / name).read_bytes().split(b"\n", 2)
    head, _, framed = reply.partition(b"\r\n\r\n")
    return Recording(path.decode(), request, head + b"\r\n\r\n", framed)


@dataclass
class SeenRequest:
    """What the fake got."""

    line: str
    headers: dict[str, str]
    body: bytes
    connection: int = 0
    """Numbered by the first request on it; health checks do not count."""


@dataclass
class ScriptedServer(Generic[Request]):
    """Listens on loopback and answers each request by the script."""

    script: Callable[[Request], Sequence[Step]]
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    written_bytes: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _server: asyncio.Server | None = None

    def play(self, *steps: Step) -> None:
        """Answer every request from now on with these steps."""
        self.script = lambda _: steps

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def asked(self, count: int = 1) -> None:
        """Wait until so many requests have come."""
        async with asyncio.timeout(60):
            while len(self.requests) < count:
                await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def _wait(self, event: asyncio.Event, reader: asyncio.StreamReader) -> None:
        waiting = asyncio.create_task(event.wait())
        leaving = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not leaving.result():
                raise ConnectionResetError
        finally:
            waiting.cancel()
            leaving.cancel()
            await asyncio.gather(waiting, leaving, return_exceptions=True)


@dataclass
class FakeVllm(ScriptedServer[SeenRequest]):
    """Keeps its connections open until told otherwise."""

    models: list[str] | None = None
    """What the watch is told; None: that it needs a key."""
    healthy: bool = True
    metrics: bytes | None = None
    """What `GET /metrics` tells; None: the script answers it."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        self.writers.append(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                if request.line == "GET /health HTTP/1.1":
                    status = "200 OK" if self.healthy else "503 Service Unavailable"
                    writer.write(whole_reply(b"", status))
                    continue
                if self.metrics is not None and request.line == "GET /metrics HTTP/1.1":
                    writer.write(whole_reply(self.metrics))
                    continue
                if request.headers.get("user-agent") == "learning-sidecar-watch":
                    writer.write(self._models_reply())
                    continue
                if number == 0:
                    number = self.connections = self.connections + 1
                self.requests.append(replace(request, connection=number))
                await self._play(self.script(request), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.client_left.set()
        finally:
            writer.close()

    def _models_reply(self) -> bytes:
        if self.models is None:
            return whole_reply(b'{"error":"Unauthorized"}', "401 Unauthorized")
        cards = [{"id": name, "object": "model"} for name in self.models]
        return whole_reply(json.dumps({"object": "list", "data": cards}).encode())

    async def _play(
        self, steps: Sequence[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                self.written_bytes += len(step)
            elif isinstance(step, asyncio.Event):
                await self._wait(step, reader)
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                if step == RESET:
                    writer.transport.abort()
                raise ConnectionAbortedError(step)


async def _read_request(reader: asyncio.StreamReader) -> SeenRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = head.decode().split("\r\n")
    headers = {
        name.lower(): value for name, _, value in (item.partition(": ") for item in lines if item)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return SeenRequest(line, headers, body)


def load_metrics(*, running: float = 0, waiting: float = 0, kv_cache: float = 0) -> bytes:
    """What vLLM's metrics page says of its load."""
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {kv_cache}\n'
    ).encode()


def whole_reply(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ndate: Sat, 21 Nov 2026 03:57:56 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: application/json\r\n{extra}\r\n"
    )
    return head.encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
