"""Ingest, scoring, the learner and control, each killed with SIGKILL while requests go on. All of
them are real processes on one temporary store, behind a vLLM that plays a script. No request may
fail for it, and behind it every capture is in the outbox or in the store, once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from demo.ports import free_port
from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProcess
from support.traffic import Faults

ROOMS = {
    "ingest": "ingest",
    "score": "ingest.score",
    "learn": "learner",
    "control": "deploy",
}


class Room:
    """One of the processes behind the data plane."""

    def __init__(self, name: str, config: Path, env: dict[str, str]) -> None:
        self.name = name
        self._module = ROOMS[name]
        self._config = config
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        log = (self._config.parent / f"{self.name}.log").open("ab")
        with log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", self._module, "--config", str(self._config)),
                cwd=self._config.parent,
                env=self._env,
                stdout=log,
                stderr=log,
            )

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def said(self) -> str:
        return (self._config.parent / f"{self.name}.log").read_text()[-3000:]


@pytest.fixture
async def rooms(
    fake_vllm: FakeVllm, state_dir: Path, room_env: dict[str, str]
) -> AsyncIterator[Callable[..., Any]]:
    """Start all four, or those that are named, on the proxy's outbox and store."""
    started: dict[str, Room] = {}

    async def start(*names: str) -> dict[str, Room]:
        config = state_dir / "rooms.toml"
        sections: dict[str, dict[str, object]] = {
            "serving": {
                "upstreams": [f"http://127.0.0.1:{fake_vllm.port}"],
                "model": "smollm2-135m",
            },
            "bus": {"url": f"sqlite:///{state_dir}/outbox.db"},
            "store": {"url": f"sqlite:///{state_dir}/store.db"},
            "learner": {"adapters_dir": str(state_dir / "adapters"), "schedule": "manual"},
            "admin": {"port": free_port()},
            "judge": {"model": "openai/none", "api_base": f"http://127.0.0.1:{fake_vllm.port}"},
        }
        lines = [f"state_dir = {json.dumps(str(state_dir))}"]
        for name, values in sections.items():
            lines += (f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items()))
        config.write_text("\n".join(lines))
        for name in names or ROOMS:
            started[name] = Room(name, config, {**room_env, "OPENAI_API_KEY": "none"})
            await started[name].start()
        return started

    yield start
    for room in started.values():
        await room.kill()


def stored(path: Path) -> list[str]:
    """The exchange ids in the store; empty while it has no tables."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as connection:
            return [name for (name,) in connection.execute("SELECT exchange_id FROM exchange")]
    except sqlite3.OperationalError:
        return []


async def store_grows(path: Path, room: Room) -> None:
    """Wait until ingest has stored more than it had."""
    before = len(stored(path))
    async with asyncio.timeout(60):
        while len(stored(path)) <= before:
            assert room.runs, room.said()
            await asyncio.sleep(0.05)


async def test_any_room_may_die_under_load(
    start_process: StartProcess,
    answering: FakeVllm,
    faults: Faults,
    rooms: Any,
    state_dir: Path,
) -> None:
    child = await start_process()
    running = await rooms()
    store = state_dir / "store.db"
    async with faults.traffic(child, workers=2, pause_s=0.02) as traffic:
        await store_grows(store, running["ingest"])
        for name in ("score", "learn", "control"):
            assert running[name].runs, running[name].said()
            await running[name].kill()
            await traffic.more(10)
        for _ in range(2):  # in the middle of a batch, sooner or later
            await running["ingest"].kill()
            await traffic.more(30)
            await running["ingest"].start()
            await store_grows(store, running["ingest"])
    accounts = await faults.accounts(child, traffic.sent)

    async with asyncio.timeout(60):
        while faults.rows(state_dir / "outbox.db"):
            assert running["ingest"].runs, running["ingest"].said()
            await asyncio.sleep(0.05)
    assert set(traffic.statuses) == {"200"}
    assert accounts.lost == {}
    found = stored(store)
    assert len(found) == len(set(found)) == accounts.kept == traffic.sent
