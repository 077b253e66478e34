"""Start the fake upstream and the contenders, each pinned to its core; stop them again by pid."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.relay import process_tree
from benchmarks.relay.contenders import Launch, Place, Start
from benchmarks.relay.ends import Ends
from benchmarks.relay.scenarios import BY_NAME, body
from benchmarks.relay.unavailable import UnavailableError
from sidecar.parent_death import guarded_command

ROOT = Path(__file__).resolve().parents[2]
READY_S = 240.0
"""LiteLLM takes half a minute to import on one core."""
STOP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """The proxy that is loaded has one to itself; load, upstream, the idle proxies and the rest
    share the other."""

    proxy: int
    ends: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A contender that answers."""

    name: str
    port: int
    pid: int | None
    """None: the upstream itself, which is not a contender's process tree."""
    launch: Launch


def pick_cores() -> Cores:
    """The first two that this process may use. Raises: UnavailableError with only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UnavailableError("needs two cores: one for the proxy, one for load and upstream")
    return Cores(proxy=cores[0], ends=cores[1])


@contextmanager
def upstream(ends: Ends, core: int, models: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Run the fake upstream; gives (port, pid)."""
    with _process(
        _pinned(core, (str(ends.upstream), "0", *models)), {}, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        line = run.stdout.readline()
        if not line.strip().isdigit():
            raise UnavailableError(f"the fake upstream did not start: {line!r}")
        yield int(line), run.pid


@contextmanager
def on_stage(running: Running, cores: Cores) -> Iterator[None]:
    """Give a contender the proxy's core for as long as it is measured. The idle ones have
    housekeeping too, and each time that one of them wakes the loaded one finds its caches cold."""
    if running.pid is None:
        yield
        return
    process_tree.pin(running.pid, cores.proxy)
    try:
        yield
    finally:
        process_tree.pin(running.pid, cores.ends)


@contextmanager
def contender(name: str, start: Start, place: Place, core: int) -> Iterator[Running]:
    """Run one contender until it answers. Raises: UnavailableError when it does not."""
    place.folder.mkdir(parents=True)
    log_path = place.folder / "log.txt"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place.folder, ignore_errors=True)
        launch = start(place)
        for path in launch.takes_away:
            stack.callback(shutil.rmtree, path, ignore_errors=True)
        log = stack.enter_context(log_path.open("wb"))
        run = stack.enter_context(
            _process(_pinned(core, launch.command), launch.env, stdout=log, stderr=log)
        )
        _await_answer(name, launch, place.port, run, log_path)
        for command in launch.beside:
            pinned = _pinned(place.ends_core, command)
            stack.enter_context(_process(pinned, {}, stdout=log, stderr=log))
        yield Running(name=name, port=place.port, pid=run.pid, launch=launch)


def _pinned(core: int, command: Sequence[str]) -> tuple[str, ...]:
    return (*guarded_command(), "taskset", "-c", str(core), *command)


@contextmanager
def _process(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own (Ctrl-C is for us), ended with all that it started."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **env},
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        process_tree.share_priority(child.pid)
        yield child
    finally:
        _stop(child)
        if child.stdout is not None:
            child.stdout.close()


def _stop(child: subprocess.Popen[bytes]) -> None:
    members = process_tree.tree(child.pid)
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for pid in members:
        if pid != child.pid and process_tree.in_session(pid, child.pid):
            os.kill(pid, signal.SIGKILL)


def _await_answer(
    name: str, launch: Launch, port: int, run: subprocess.Popen[bytes], log_path: Path
) -> None:
    """Wait until a chat request is answered with 200."""
    deadline = time.monotonic() + READY_S
    last = "nothing answered"
    while time.monotonic() < deadline and run.poll() is None:
        try:
            status, text = ask(port, launch)
        except (OSError, http.client.HTTPException) as error:
            last = str(error)
        else:
            if status == 200:
                return
            last = f"{status} {text[:200]!r}"
        time.sleep(0.2)
    tail = log_path.read_text(errors="replace")[-500:].strip()
    raise UnavailableError(f"{name} did not become ready: {last}; its log ends: {tail}")


def ask(port: int, launch: Launch) -> tuple[int, bytes]:
    """One small chat request. Raises: OSError, http.client.HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {launch.key}"}
        connection.request("POST", launch.path, body(BY_NAME["small1"], 0), headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()
