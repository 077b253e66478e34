"""A vLLM that plays a script, and a proxy in front of it: in this process or in one of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
import uvloop

import demo.ports
from sidecar.capture.recorder import Limits
from sidecar.proxy import Proxy
from sidecar.settings import Settings
from support.fake_vllm import RECORDED, FakeVllm, SeenRequest, Step, whole_reply
from support.proxy_kit import (
    Child,
    FreePort,
    MemorySink,
    MoreVllms,
    Recorded,
    Running,
    StartProcess,
    StartProxy,
    Wire,
)

hypothesis.settings.register_profile("shared-machine")
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
def recorded() -> Recorded:
    """Bodies that a vLLM 0.32 sent; ids and times are set to fixed values."""
    return lambda name: (RECORDED / name).read_bytes()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Short, for the unix socket in it; pytest's own paths are too long for one."""
    with TemporaryDirectory(prefix="px-") as path:
        yield Path(path)


@pytest.fixture
def free_port() -> FreePort:
    """Two proxies of one `state_dir` need ports of their own."""
    return demo.ports.free_port


@pytest.fixture
async def fake_vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(script=lambda _: [whole_reply(b"{}")])
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def more_vllms() -> AsyncIterator[MoreVllms]:
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


TIMES = {
    "connect_timeout_s": "sidecar.proxy.CONNECT_TIMEOUT_S",
    "health_interval_s": "sidecar.proxy.HEALTH_INTERVAL_S",
    "slow_first_byte_s": "sidecar.proxy.SLOW_FIRST_BYTE_S",
    "head_timeout_s": "sidecar.relay.client.HEAD_TIMEOUT_S",
    "body_timeout_s": "sidecar.relay.client.BODY_TIMEOUT_S",
    "write_timeout_s": "sidecar.relay.client.WRITE_TIMEOUT_S",
    "idle_timeout_s": "sidecar.relay.client.IDLE_TIMEOUT_S",
    "routing_poll_s": "sidecar.proxy.ROUTING_POLL_S",
    "record_bytes": "sidecar.capture.outbox.RECORD_BYTES",
    "max_in_flight": "sidecar.relay.context.MAX_IN_FLIGHT",
    "held_bodies": "sidecar.relay.context.HELD_BODIES",
    "max_connections": "sidecar.relay.server.MAX_CONNECTIONS",
}


@pytest.fixture
async def start_proxy(
    fake_vllm: FakeVllm, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StartProxy]:
    """Start a proxy in front of the fake; keyword arguments are sections of the settings, `proxy`
    with the `TIMES` of the relay, `capture` with the recorder's `Limits`."""
    running: list[Running] = []

    async def start(
        sink: Any = None,
        tracing: Any = None,
        clock: Callable[[], float] = time.time,
        **sections: dict[str, Any],
    ) -> Running:
        proxy_section = {"port": 0, "drain_timeout_s": 1.0, **sections.get("proxy", {})}
        for name in TIMES.keys() & proxy_section.keys():
            monkeypatch.setattr(TIMES[name], proxy_section.pop(name))
        capture = {"flush_interval_s": 0.005, **sections.get("capture", {})}
        limits = {one.name: capture.pop(one.name) for one in fields(Limits) if one.name in capture}
        monkeypatch.setattr("sidecar.proxy.LIMITS", Limits(**limits))
        settings = Settings(
            state_dir=state_dir,
            serving={
                "upstreams": (f"http://127.0.0.1:{fake_vllm.port}",),
                "model": "smollm2-135m",
                **sections.get("serving", {}),
            },
            access=sections.get("access", {}),
            best_of=sections.get("best_of", {}),
            proxy=proxy_section,
            capture=capture,
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
