"""`sidecar up`: start every process of one machine, keep them alive, stop what was started.

Children get a process group each, so Ctrl-C on the terminal reaches the supervisor alone and it
stops them in order; should the supervisor itself be killed, the kernel ends its children
(`deploy.leash`). Each child writes to its own log under `state_dir/logs`. A child that dies is
started again after a back-off, and that is said. Only processes started here are ever signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import httpx
import structlog

from deploy.processes import ENGINE, RESTARTS, ProcessSpec, describe_exit, plan
from sidecar.settings import Settings

log = structlog.get_logger()

TICK_S = 0.2
STOP_TIMEOUT_S = 35.0
"""A child that has not gone this long after TERM is killed; longer than the proxy takes to
drain and to write its captures."""
REMIND_S = 30.0


class Child:
    """One supervised process and its log file."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.wait_s: float | None = None
        self.restart_at = 0.0
        self._log_file: IO[bytes] | None = None

    def start(self, now: float) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = self.log_path.open("ab")
        self.process = subprocess.Popen(
            (sys.executable, "-m", "deploy.leash", str(os.getpid()), *self.spec.command),
            env={**os.environ, **self.spec.env},
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started_at = now
        log.info("process_started", name=self.spec.name, pid=self.process.pid)

    def check(self, now: float) -> None:
        """Notice a death, plan the restart, carry it out when it is due."""
        if self.process is None:
            if now >= self.restart_at:
                self.start(now)
            return
        code = self.process.poll()
        if code is None:
            return
        self.wait_s = RESTARTS.wait_s(self.wait_s, now - self.started_at)
        self.restart_at = now + self.wait_s
        log.error(
            "process_died",
            name=self.spec.name,
            how=describe_exit(code),
            restart_in_s=self.wait_s,
            log=str(self.log_path),
            last_line=self.last_line(),
        )
        self.process = None
        self._close_log()

    def last_line(self) -> str:
        """The end of its log: what it said before it died."""
        try:
            tail = self.log_path.read_bytes()[-2_000:]
        except OSError:
            return ""
        lines = tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def terminate(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self._signal(signal.SIGTERM)

    def join(self, deadline: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("process_killed", name=self.spec.name, after_s=STOP_TIMEOUT_S)
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._close_log()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, number)  # its own group: start_new_session
        except ProcessLookupError:
            log.debug("process_already_gone", name=self.spec.name)

    def _close_log(self) -> None:
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None


class Supervisor:
    """Starts, watches and stops the children of one `sidecar up`."""

    def __init__(
        self,
        settings: Settings,
        config: Path | None,
        *,
        announce: Callable[[str], None],
        specs: Sequence[ProcessSpec] | None = None,
    ) -> None:
        self._settings = settings
        self._announce = announce
        logs = settings.state_dir / "logs"
        chosen = plan(settings, config) if specs is None else specs
        self.children = [Child(spec, logs / f"{spec.name}.log") for spec in chosen]
        self.stopping = threading.Event()

    def run(self) -> int:
        """Supervise until SIGINT or SIGTERM. Returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.stopping.set())
        waiting = threading.Thread(target=self._tell_when_ready, daemon=True)
        try:
            for child in self.children:
                child.start(time.monotonic())
            waiting.start()
            while not self.stopping.wait(TICK_S):
                now = time.monotonic()
                for child in self.children:
                    child.check(now)
        finally:
            self.stop()
        return 0

    def stop(self) -> None:
        """Stop the children, our own engine after all others: the proxy drains through it."""
        self._announce("stopping")
        engine = [child for child in self.children if child.spec.name == ENGINE]
        for together in ([child for child in self.children if child not in engine], engine):
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for child in together:
                child.terminate()
            for child in together:
                child.join(deadline)
        self._announce("stopped")

    def _tell_when_ready(self) -> None:
        settings = self._settings
        if not self._wait_for_engine(settings.serving.upstreams):
            return
        proxy = f"http://{settings.proxy.host}:{settings.proxy.port}"
        admin = f"http://{settings.admin.host}:{settings.admin.port}"
        for url in (f"{proxy}/readyz", f"{admin}/readyz"):
            while _answer(url) != 200:
                if self.stopping.wait(TICK_S):
                    return
        self._announce(
            f"ready: set your agent's base_url to {proxy}/v1 "
            f"(model {settings.serving.model}); admin at {admin}"
        )

    def _wait_for_engine(self, urls: Sequence[str]) -> bool:
        """Wait until one vLLM answers; say what is tried and what to check. False: stopping."""
        said_at: float | None = None
        owned = bool(self._settings.engine.command)
        while not {200, 401} & (statuses := {_answer(f"{url}/v1/models") for url in urls}):
            status = next((one for one in statuses if one is not None), None)
            now = time.monotonic()
            if said_at is None or now - said_at >= REMIND_S:
                said_at = now
                self._announce(_waiting_line(" or ".join(urls), status, owned=owned))
            if self.stopping.wait(1.0):
                return False
        return True


def _waiting_line(url: str, status: int | None, *, owned: bool) -> str:
    if owned:
        return f"waiting for our vLLM at {url} to load its model; its log is logs/engine.log"
    seen = "nothing answers" if status is None else f"it answers with status {status}"
    return (
        f"waiting for vLLM at {url}: {seen}; check that it is running, that serving.upstreams "
        "names its address without /v1, and that no firewall is between; trying again every second"
    )


def _answer(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=2.0).status_code
    except httpx.HTTPError:
        return None
