"""A vLLM that plays a script, a sink in memory, and a proxy between them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
import uvloop

from sidecar.errors import OutboxError
from sidecar.proxy import Proxy
from sidecar.records import Exchange
from sidecar.scoring.wire import Material, NoPick, Verdict
from sidecar.settings import Settings
from support.fake_vllm import (
    CLOSE,
    LAST_CHUNK,
    RECORDED,
    RESET,
    STREAM_HEAD,
    FakeVllm,
    SeenRequest,
    Step,
    chunk,
    recording,
    whole_reply,
)

hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")
ROOT = Path(__file__).resolve().parents[2]
OWN_PATH = os.environ.get("PYTHONPATH") or str(ROOT)
"""Where a child process finds what this one runs, the compiled relay too."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the product runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def recorded() -> Callable[[str], bytes]:
    """Bodies that a vLLM 0.32 sent; ids and times are set to fixed values."""
    return lambda name: (RECORDED / name).read_bytes()


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
    """The bytes that tests speak, as one fixture: importlib mode has no shared modules."""

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


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Short, for the unix socket in it; pytest's own paths are too long for one."""
    with TemporaryDirectory(prefix="px-") as path:
        yield Path(path)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A port that nobody holds: two proxies of one `state_dir` need ports of their own."""

    def free() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return free


@pytest.fixture
async def fake_vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(script=lambda _: [whole_reply(b"{}")])
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def more_vllms() -> AsyncIterator[Callable[..., Awaitable[FakeVllm]]]:
    """Start another fake: `models` as it lists them, and its script."""
    fakes: list[FakeVllm] = []

    async def start(
        script: Callable[[SeenRequest], Sequence[Step]] = lambda _: [whole_reply(b"{}")],
        models: list[str] | None = None,
    ) -> FakeVllm:
        fake = FakeVllm(script=script, models=models)
        await fake.start()
        fakes.append(fake)
        return fake

    yield start
    for fake in fakes:
        await fake.stop()


StartProxy = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_proxy(fake_vllm: FakeVllm, state_dir: Path) -> AsyncIterator[StartProxy]:
    """Start a proxy in front of the fake; keyword arguments are sections of the settings."""
    running: list[Running] = []

    async def start(
        sink: Any = None,
        tracing: Any = None,
        clock: Callable[[], float] = time.time,
        **sections: dict[str, Any],
    ) -> Running:
        settings = Settings(
            state_dir=state_dir,
            serving={
                "upstreams": (f"http://127.0.0.1:{fake_vllm.port}",),
                "model": "smollm2-135m",
                **sections.get("serving", {}),
            },
            access=sections.get("access", {}),
            best_of=sections.get("best_of", {}),
            proxy={"port": 0, "drain_timeout_s": 1.0, **sections.get("proxy", {})},
            capture={"flush_interval_s": 0.005, **sections.get("capture", {})},
            bus={"url": f"sqlite:///{state_dir}/outbox.db", **sections.get("bus", {})},
            store={"url": f"sqlite:///{state_dir}/store.db", **sections.get("store", {})},
            telemetry=sections.get("telemetry", {}),
        )
        memory = sink if isinstance(sink, MemorySink) else MemorySink()
        proxy = Proxy(settings, tracing, sink if sink is not None else memory, clock=clock)
        started = Running(proxy, await proxy.start(), memory)
        running.append(started)
        return started

    yield start
    for item in running:
        await item.proxy.stop()


@dataclass
class Child:
    """A proxy in a process of its own."""

    process: asyncio.subprocess.Process
    port: int
    lines: list[str]
    """What it has logged."""

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a new connection, and read until the proxy closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        received = await reader.read()
        writer.close()
        return received

    async def metrics(self) -> dict[str, float]:
        """`name{labels}` -> value, as Prometheus would scrape them."""
        reply = await self.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        lines = split(reply)[2].decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


StartProcess = Callable[..., Awaitable[Child]]


@pytest.fixture
async def start_process(fake_vllm: FakeVllm, state_dir: Path) -> AsyncIterator[StartProcess]:
    """Start `python -m sidecar` in front of the fake; keyword arguments are sections of the
    settings, and `env` more variables of its environment."""
    started: list[asyncio.subprocess.Process] = []
    readers: list[asyncio.Task[None]] = []

    async def start(env: dict[str, str] | None = None, **sections: dict[str, Any]) -> Child:
        upstreams = [f"http://127.0.0.1:{fake_vllm.port}"]
        settings: dict[str, dict[str, Any]] = {
            "serving": {"upstreams": upstreams, "model": "smollm2-135m"},
            "proxy": {"port": 0, "drain_timeout_s": 1.0},
            "capture": {"flush_interval_s": 0.005},
            "bus": {"url": f"sqlite:///{state_dir}/outbox.db"},
            "store": {"url": f"sqlite:///{state_dir}/store.db"},
            "telemetry": {"log_json": True},
        }
        for name, values in sections.items():
            settings[name] = {**settings.get(name, {}), **values}
        lines = [f"state_dir = {json.dumps(str(state_dir))}"]
        for name, values in settings.items():
            lines += (f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items()))
        config = state_dir / f"sidecar-{len(started)}.toml"
        config.write_text("\n".join(lines))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "sidecar", "--config", str(config)),
            cwd=state_dir,
            env={**os.environ, "PYTHONPATH": OWN_PATH, **(env or {})},
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        child = Child(process, 0, [])
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while child.port == 0:
                line = (await process.stderr.readline()).decode()
                assert line, f"the proxy ended early: {child.lines}"
                child.lines.append(line)
                if '"proxy_ready"' in line:
                    child.port = int(json.loads(line)["port"])
        readers.append(asyncio.create_task(_keep_lines(process.stderr, child.lines)))
        return child

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await asyncio.gather(*readers)


async def _keep_lines(stream: asyncio.StreamReader, lines: list[str]) -> None:
    while line := await stream.readline():
        lines.append(line.decode())
