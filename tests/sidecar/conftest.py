"""A vLLM that plays a script, a sink in memory, and a proxy between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import uvloop
from opentelemetry.sdk.trace import TracerProvider

from sidecar.errors import OutboxError
from sidecar.proxy import Proxy
from sidecar.records import Exchange
from sidecar.settings import Settings

RECORDED = Path(__file__).with_name("recorded")
CLOSE = "close"
RESET = "reset"
Step = bytes | asyncio.Event | str
"""What the fake does next: write these bytes, wait for this, close, or reset."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the product runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def recorded() -> Callable[[str], bytes]:
    """Bodies that a vLLM 0.32 sent; ids and times are set to fixed values."""
    return lambda name: (RECORDED / name).read_bytes()


@dataclass
class SeenRequest:
    """What the fake got."""

    line: str
    headers: dict[str, str]
    body: bytes
    connection: int = 0
    """Numbered by the first request on it; health checks do not count."""


@dataclass
class FakeVllm:
    """Answers each request by the script; keeps its connections open until told otherwise."""

    script: Callable[[SeenRequest], Sequence[Step]]
    requests: list[SeenRequest] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    written_bytes: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        self.writers.append(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                if request.line == "GET /health HTTP/1.1":
                    writer.write(whole_reply(b""))
                    continue
                if number == 0:
                    number = self.connections = self.connections + 1
                self.requests.append(replace(request, connection=number))
                await self._play(self.script(request), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.client_left.set()
        finally:
            writer.close()

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
            else:
                if step == RESET:
                    writer.transport.abort()
                raise ConnectionAbortedError(step)

    async def _wait(self, event: asyncio.Event, reader: asyncio.StreamReader) -> None:
        waiting = asyncio.create_task(event.wait())
        leaving = asyncio.create_task(reader.read(1))
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not leaving.result():
            waiting.cancel()
            raise ConnectionResetError
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


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


class MemorySink:
    """The in-memory `ExchangeSink`. `fail_with`: a reason, while it refuses everything."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.exchanges: list[Exchange] = []
        self.fail_with: str | None = None
        self.closed = False
        self._changed = threading.Condition()

    def write(self, exchanges: Sequence[Exchange]) -> int:
        if self.fail_with is not None:
            raise OutboxError(self.fail_with, "the memory sink was told to fail")
        kept = exchanges[: max(0, self.room - len(self.exchanges))]
        with self._changed:
            self.exchanges += kept
            self._changed.notify_all()
        return len(kept)

    def close(self) -> None:
        self.closed = True

    def wait_for(self, count: int, timeout_s: float = 5.0) -> list[Exchange]:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.exchanges) >= count, timeout_s)
        assert came, f"{len(self.exchanges)} exchanges came, {count} were expected"
        return self.exchanges


@dataclass
class Running:
    """A proxy that runs, and how to talk to it."""

    proxy: Proxy
    port: int
    sink: MemorySink

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a new connection, and read until the proxy closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        received = await reader.read()
        writer.close()
        return received

    async def captured(self, count: int) -> list[Exchange]:
        return await asyncio.to_thread(self.sink.wait_for, count)

    def metric(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0

    async def metric_reaches(self, value: float, name: str, **labels: str) -> None:
        """Wait until a counter that another thread moves has this value."""
        async with asyncio.timeout(5):
            while self.metric(name, **labels) != value:
                await asyncio.sleep(0.005)


def post(
    body: bytes, *, headers: str = "", path: str = "/v1/chat/completions", close: bool = True
) -> bytes:
    ending = "Connection: close\r\n" if close else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{headers}{ending}\r\n"
    )
    return head.encode() + body


def split(reply: bytes) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers, and the body with its chunked framing undone."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (item.partition(": ") for item in lines)}
    if headers.get("transfer-encoding") != "chunked":
        return line, headers, rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return line, headers, body
        body += rest[:length]
        rest = rest[length + 2 :]


@dataclass
class Wire:
    """The bytes that tests speak, as one fixture: importlib mode has no shared modules."""

    CLOSE = CLOSE
    RESET = RESET
    STREAM_HEAD = STREAM_HEAD
    LAST_CHUNK = LAST_CHUNK
    whole_reply = staticmethod(whole_reply)
    chunk = staticmethod(chunk)
    post = staticmethod(post)
    split = staticmethod(split)
    Sink = MemorySink


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Short, for the unix socket in it; pytest's own paths are too long for one."""
    with TemporaryDirectory(prefix="px-") as path:
        yield Path(path)


@pytest.fixture
async def fake_vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(script=lambda _: [whole_reply(b"{}")])
    await fake.start()
    yield fake
    await fake.stop()


StartProxy = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_proxy(fake_vllm: FakeVllm, state_dir: Path) -> AsyncIterator[StartProxy]:
    """Start a proxy in front of the fake; keyword arguments are sections of the settings."""
    running: list[Running] = []
    tracing = TracerProvider()

    async def start(sink: Any = None, **sections: dict[str, Any]) -> Running:
        settings = Settings(
            state_dir=state_dir,
            serving={
                "upstreams": (f"http://127.0.0.1:{fake_vllm.port}",),
                "model": "smollm2-135m",
            },
            proxy={"port": 0, "drain_timeout_s": 1.0, **sections.get("proxy", {})},
            capture={"flush_interval_s": 0.005, **sections.get("capture", {})},
            bus={"url": f"sqlite:///{state_dir}/outbox.db", **sections.get("bus", {})},
            store={"url": f"sqlite:///{state_dir}/store.db"},
        )
        memory = sink if isinstance(sink, MemorySink) else MemorySink()
        proxy = Proxy(settings, tracing, sink if sink is not None else memory)
        started = Running(proxy, await proxy.start(), memory)
        running.append(started)
        return started

    yield start
    for item in running:
        await item.proxy.stop()
    tracing.shutdown()
