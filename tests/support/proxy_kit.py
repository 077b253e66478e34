"""The types of the fixtures in `tests/sidecar/conftest.py`: a sink in memory, a running proxy."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sidecar.errors import OutboxError
from sidecar.proxy import Proxy
from sidecar.records import Exchange, read_prompt_ids
from sidecar.scoring import Material, NoPick, Verdict
from support.fake_vllm import (
    CLOSE,
    LAST_CHUNK,
    RESET,
    STREAM_HEAD,
    FakeVllm,
    chunk,
    recording,
    whole_reply,
)

Recorded = Callable[[str], bytes]
FreePort = Callable[[], int]
MoreVllms = Callable[..., Awaitable[FakeVllm]]


class Target:
    """A proxy that can be sent bytes: `Running` or `Child`."""

    port: int

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a new connection, and read until the proxy closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        received = await reader.read()
        writer.close()
        return received


class MemorySink:
    """The in-memory `ExchangeSink`. `fail_with`: a reason, while it refuses everything."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.exchanges: list[Exchange] = []
        self.fail_with: str | None = None
        self.closed = False
        self.writing = threading.Event()
        self.go_on = threading.Event()
        """Cleared: a write that has begun waits for it."""
        self.go_on.set()
        self._changed = threading.Condition()

    def write(self, exchanges: Sequence[Exchange]) -> int:
        self.writing.set()
        assert self.go_on.wait(90)
        if self.fail_with is not None:
            raise OutboxError(self.fail_with, "the memory sink was told to fail")
        kept = exchanges[: max(0, self.room - len(self.exchanges))]
        with self._changed:
            self.exchanges += kept
            self._changed.notify_all()
        return len(kept)

    def close(self) -> None:
        self.closed = True

    def wait_for(self, count: int, timeout_s: float = 60.0) -> list[Exchange]:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.exchanges) >= count, timeout_s)
        assert came, f"{len(self.exchanges)} exchanges came, {count} were expected"
        return self.exchanges


class MemoryPicker:
    """The in-memory `Picker`. `script`: verdicts, or events to wait for."""

    def __init__(self, *script: Verdict | asyncio.Event) -> None:
        self.script = list(script)
        self.asked: list[Material] = []
        self.ready = True
        self.cancelled = 0

    async def pick(self, material: Material, deadline_s: float) -> Verdict:
        self.asked.append(material)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if not isinstance(step, asyncio.Event):
            return step
        try:
            async with asyncio.timeout(deadline_s):
                await step.wait()
        except TimeoutError:
            return NoPick(reason="timeout")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return NoPick(reason="judge_rubbish")


@dataclass
class Running(Target):
    """A proxy that runs, and how to talk to it."""

    proxy: Proxy
    port: int
    sink: MemorySink

    async def captured(self, count: int) -> list[Exchange]:
        exchanges = await asyncio.to_thread(self.sink.wait_for, count)
        return [read_prompt_ids(exchange) for exchange in exchanges]  # as ingest does

    def metric(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0

    async def metric_reaches(self, value: float, name: str, **labels: str) -> None:
        """Wait until a counter that another thread moves has this value."""
        async with asyncio.timeout(60):
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
    """The bytes that tests speak, as one fixture."""

    CLOSE = CLOSE
    RESET = RESET
    STREAM_HEAD = STREAM_HEAD
    LAST_CHUNK = LAST_CHUNK
    whole_reply = staticmethod(whole_reply)
    chunk = staticmethod(chunk)
    post = staticmethod(post)
    split = staticmethod(split)
    recording = staticmethod(recording)
    Sink = MemorySink
    Picker = MemoryPicker


@dataclass
class Child(Target):
    """A proxy in a process of its own."""

    process: asyncio.subprocess.Process
    port: int
    lines: list[str]
    """What it has logged."""

    async def metrics(self) -> dict[str, float]:
        """`name{labels}` -> value, as Prometheus would scrape them."""
        reply = await self.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        lines = split(reply)[2].decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    @property
    def worker(self) -> int:
        """Process id of the worker that serves."""
        pid = self.process.pid
        (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(found)

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.worker}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


StartProxy = Callable[..., Awaitable[Running]]
StartProcess = Callable[..., Awaitable[Child]]
