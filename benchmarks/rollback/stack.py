"""What is measured: a store with two champions of the past, three proxies, control, three vLLMs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx

from benchmarks.rollback.replica import BASE as MODEL
from demo.ports import free_port
from deploy.registry import audit, canaries, routing_writer, transitions
from deploy.registry.canary_rule import Move
from learner.adapter_folder import folder_digest
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow

PROXIES = 3
REPLICAS = 3
START_S = 120.0
PYTHON = sys.executable


class Stack:
    """Everything in `folder`. `stop` ends what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/store.db"
        self.replica_ports = [free_port() for _ in range(REPLICAS)]
        self.proxy_ports = [free_port() for _ in range(PROXIES)]
        self.admin_port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> list[str]:
        """Start all of it, and wait until it serves. Returns: the adapters, the champion last."""
        names = self._make_store()
        for number, port in enumerate(self.replica_ports):
            self._run(f"replica-{number}", "benchmarks.rollback.replica", str(port))
        self.start_control()
        for number, port in enumerate(self.proxy_ports):
            config = self._config(f"proxy-{number}", port)
            self._run(f"proxy-{number}", "sidecar", "--config", str(config))
        await self._wait(names)
        return names

    def start_control(self) -> None:
        config = self._config("control", free_port())
        self._run("control", "deploy", "--config", str(config))

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    def config(self) -> Path:
        return self.folder / "control.toml"

    def _make_store(self) -> list[str]:
        names = []
        with closing(Database(self.url)) as database:
            database.upgrade()
            with database.write() as session:
                routing_writer.initialise(session, MODEL, now=time.time(), actor=audit.CONTROL)
            for version in (1, 2):
                names.append(self._publish(database, version))
        return names

    def _publish(self, database: Database, version: int) -> str:
        """Make a version that went through a canary."""
        path = self.folder / f"adapter-{version}"
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"r": 4, "version": version}))
        (path / "adapter_model.safetensors").write_bytes(bytes([version]) * 64)
        digest = folder_digest(path)
        name = f"{MODEL}--v{version}-{digest[:12]}"
        now = time.time()
        with database.write() as session:
            session.add(
                AdapterRow(
                    name=name, model=MODEL, version=version, digest=digest, path=str(path),
                    parent="base", run_id=None, state="registered", reason=None, created_at=now,
                )
            )  # fmt: skip
            session.flush()
            begun = transitions.begin(
                session, model=MODEL, candidate=name, steps=(5_000,), now=now, actor="bench"
            )
            for move in (
                Move(to="gating", candidate_state="gating", reason="bench"),
                Move(to="ramping", candidate_state="ramping", reason="bench"),
                Move(to="promoted", candidate_state="champion", reason="bench"),
            ):
                canary = canaries.to_canary(canaries.find_row(session, begun.canary_id))
                transitions.apply(session, canary, move, evidence={}, now=now)
        return name

    def _config(self, name: str, port: int) -> Path:
        upstreams = json.dumps([f"http://127.0.0.1:{one}" for one in self.replica_ports])
        state = self.folder / f"state-{name}"
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'state_dir = "{state}"\n[serving]\nupstreams = {upstreams}\nmodel = "{MODEL}"\n'
            f'[store]\nurl = "{self.url}"\n[bus]\nurl = "sqlite:///{state}/outbox.db"\n'
            f"[proxy]\nport = {port}\n[admin]\nport = {self.admin_port}\n"
        )
        return path

    def _run(self, name: str, module: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [PYTHON, "-m", module, *arguments], stdout=log, stderr=log, env=dict(os.environ)
            )

    async def _wait(self, names: Sequence[str]) -> None:
        """Wait until every replica has both adapters and every proxy answers with the champion."""
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while not await self._serves(client, names):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not ready within {START_S:g} s; see {self.folder}/*.log")
                await asyncio.sleep(0.2)

    async def _serves(self, client: httpx.AsyncClient, names: Sequence[str]) -> bool:
        try:
            for port in self.replica_ports:
                models = (await client.get(f"http://127.0.0.1:{port}/v1/models")).json()["data"]
                if not set(names) <= {one["id"] for one in models}:
                    return False
            body = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}]}
            for port in self.proxy_ports:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                reply = await client.post(url, json=body)
                if reply.headers.get("x-sidecar-adapter") != names[-1]:
                    return False
        except (httpx.HTTPError, KeyError, ValueError):
            return False
        return True
