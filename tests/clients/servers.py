"""One vLLM, and two sidecars before it: one that records, one that does not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.ports import free_port
from demo.stack import MODEL, ROOT, engine_section, to_toml
from deploy.supervise import status_of
from sidecar.parent_death import guarded_command
from tests.clients.between import Between, between

RUNNING_VLLM = "TEST_VLLM_URL"
"""Names a vLLM that runs already, started as `demo.stack` does: for those who run this folder
again and again. It must be asked by nobody else meanwhile."""
ENGINE_CORE = {"VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}
"""By itself vLLM keeps off the last core. There this engine does not compete with the one of the
end-to-end test, which runs at the same time."""
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Base URLs, without `/v1`."""

    vllm: str
    capture_on: str
    capture_off: str
    behind: Between
    """Stands between the sidecar that does not record and vLLM, and keeps what both say."""
    folder: Path
    """Configuration, logs and outboxes."""


@contextlib.contextmanager
def running_servers(folder: Path) -> Iterator[Servers]:
    """Start them, and stop them by process id. Raises: AssertionError when one is not ready."""
    engine_port = free_port()
    engine = engine_section(engine_port, lora=False)
    vllm = os.environ.get(RUNNING_VLLM, f"http://127.0.0.1:{engine_port}")
    with contextlib.ExitStack() as stack:
        started, urls = [], {}
        behind = stack.enter_context(between(vllm))
        upstreams = {"capture_on": vllm, "capture_off": behind.url}
        if RUNNING_VLLM not in os.environ:
            command, env = engine["command"], {**engine["env"], **ENGINE_CORE}
            started.append(stack.enter_context(process(folder, "vllm", command, env)))
        for name, rate in (("capture_on", 1.0), ("capture_off", 0.0)):
            port = free_port()
            urls[name] = f"http://127.0.0.1:{port}"
            command = proxy_command(folder / name, upstreams[name], port, rate)
            started.append(stack.enter_context(process(folder, name, command, {})))
        ready = [f"{vllm}/health", *(f"{url}/readyz" for url in urls.values())]
        wait_until_ready(started, ready, folder)
        yield Servers(vllm=vllm, behind=behind, folder=folder, **urls)


def proxy_command(folder: Path, vllm: str, port: int, sample_rate: float) -> list[str]:
    """The proxy alone, with defaults: no store means that the base answers everything."""
    folder.mkdir()
    sections: dict[str, dict[str, Any]] = {
        "serving": {"upstreams": [vllm], "model": MODEL},
        "proxy": {"port": port},
        "capture": {"sample_rate": sample_rate},
        "bus": {"url": f"sqlite:///{folder}/outbox.db"},
        "store": {"url": f"sqlite:///{folder}/store.db"},
    }
    config = folder / "sidecar.toml"
    config.write_text(to_toml(folder, sections), encoding="utf-8")
    return [sys.executable, "-P", "-m", "sidecar", "--config", str(config)]


@contextlib.contextmanager
def process(
    folder: Path, name: str, command: list[str], env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its output in `<folder>/<name>.log`; it ends with the caller."""
    with (folder / f"{name}.log").open("wb") as log:
        running = subprocess.Popen(
            [*guarded_command(), *command],  # it ends with us, also when we are killed
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, which is ended as a whole
        )
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            with contextlib.suppress(ProcessLookupError):
                # A vLLM that is killed while it loads leaves its children behind.
                os.killpg(running.pid, signal.SIGKILL)


def wait_until_ready(started: list[subprocess.Popen[bytes]], urls: list[str], folder: Path) -> None:
    """Raises: AssertionError when a URL does not answer in time or a process ends before."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while urls:
        ended = [one.returncode for one in started if one.poll() is not None]
        assert not ended, f"a server ended with {ended[0]}: see {folder}"
        assert time.monotonic() < deadline, f"{urls[0]} was not ready in time: see {folder}"
        if status_of(urls[0]) == 200:
            urls = urls[1:]
        else:
            time.sleep(0.2)
