"""`python -m benchmarks.relay.steps`: what the relay itself does, without sockets, in microseconds.

One client's connection and one of vLLM's, in memory; requests and replies as the benchmark's load
generator and fake vLLM write them. The CPU of the relay's thread, best of several repeats: it tells
where work went, not what a request costs in the end (`make bench BENCH=relay` does). Replies that
are captured are dropped where the capture's thread would take them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvloop

from benchmarks.compiled import build as build_compiled, search_path
from benchmarks.relay import ours, scenarios
from benchmarks.relay.contenders import Launch, Place
from benchmarks.relay.ends import build
from benchmarks.relay.interpreter import chosen
from benchmarks.relay.run import BENCH
from benchmarks.relay.stage import ROOT, pick_cores, upstream
from sidecar.proxy import Proxy, relay_is_compiled
from sidecar.records import Exchange
from sidecar.relay.client import ClientConnection
from sidecar.relay.upstream import UpstreamConnection
from sidecar.settings import load_settings

REPEATS = 10
REQUESTS = {"small32": 5_000, "sse8": 50, "fresh32": 5_000}
HEAD_END = b"\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that keeps the last bytes written."""

    def __init__(self) -> None:
        super().__init__()
        self.last = b""

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.last = data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Nowhere:
    """A sink for exchanges."""

    def write(self, exchanges: Sequence[Exchange]) -> int:
        return len(exchanges)

    def close(self) -> None: ...


def main(argv: Sequence[str]) -> int:
    if argv == ["--this-build"]:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        uvloop.run(_measure())
        return 0
    python = chosen()
    print(python.what)
    for first in (str(ROOT), search_path(build_compiled())):
        command = [python.path, "-P", "-m", "benchmarks.relay.steps", "--this-build"]
        env = {**os.environ, **ours.environment(first)}
        subprocess.run(command, check=True, env=env)
    return 0


async def _measure() -> None:
    build_name = "compiled" if relay_is_compiled() else "interpreted"
    with fake_upstream() as (folder, port):
        for name, launch in (
            ("off", ours.pure_capture_off(place(folder / "off", port))),
            ("on", ours.pure_capture_on(place(folder / "on", port))),
        ):
            proxy = Proxy(load_settings(folder / name / "sidecar.toml"), sink=Nowhere())
            for scenario, count in REQUESTS.items():
                step = Steps(proxy, launch, scenarios.BY_NAME[scenario], port)
                per_request, per_event = step.best_us(count)
                unit = f"{per_event:6.2f} us an event" if per_event else f"{per_request:6.1f} us"
                print(f"{build_name:12} capture {name:4} {scenario:8} {unit}")


@contextmanager
def fake_upstream() -> Iterator[tuple[Path, int]]:
    """Start the fake vLLM. Yields: an empty folder for the relays, and its port."""
    BENCH.mkdir(exist_ok=True)
    models = (scenarios.MODEL, ours.CHAMPION, ours.CANARY)
    with (
        tempfile.TemporaryDirectory(dir=BENCH) as folder,
        upstream(build(BENCH / "ends"), pick_cores().ends, models) as (port, _),
    ):
        yield Path(folder), port


def place(folder: Path, port: int) -> Place:
    """Make the folder of one relay in front of the fake vLLM at a port."""
    folder.mkdir()
    return Place(bench=BENCH, folder=folder, port=18_080, upstream_port=port, ends_core=0)


class Steps:
    """One scenario's requests through one relay."""

    def __init__(
        self, proxy: Proxy, launch: Launch, scenario: scenarios.Scenario, port: int
    ) -> None:
        proxy.lines.source.poll()
        self._capture = proxy.capture
        context = proxy._relay._context
        pool = context.replicas.all[0].pool
        self._to_vllm = Wire()
        self._vllm = UpstreamConnection(pool)
        self._vllm.connection_made(self._to_vllm)
        pool.give_back(self._vllm)
        self._client = ClientConnection(context, lambda _: None)
        self._client.connection_made(Wire())
        self._requests = scenarios.requests(scenario, "127.0.0.1:18080", launch)
        self._streams = scenario.kind == "stream"
        self._port = port
        self._replies: dict[bool, list[bytes]] = {}

    def best_us(self, count: int) -> tuple[float, float]:
        """Microseconds a request, and an event (0 when nothing is streamed)."""
        self.run(len(self._requests))
        best_s, events = float("inf"), 0
        for _ in range(REPEATS):
            began = time.thread_time()
            events = self.run(count)
            best_s = min(best_s, time.thread_time() - began)
        return best_s / count * 1e6, best_s / events * 1e6 if self._streams else 0.0

    def run(self, count: int) -> int:
        """Relay this many requests. Returns: how many pieces the replies had."""
        ask: Callable[[bytes], None] = self._client.data_received
        answer: Callable[[bytes], None] = self._vllm.data_received
        requests, wire, pieces = self._requests, self._to_vllm, 0
        for number in range(count):
            ask(requests[number % len(requests)])
            reply = self._reply_to(wire.last)
            for piece in reply:
                answer(piece)
            pieces += len(reply)
            self._capture._queue.clear()
            self._capture.held.offered = 0
        return pieces

    def _reply_to(self, sent: bytes) -> list[bytes]:
        """What the fake vLLM says, as it is read; asked once for each adapter."""
        champion = ours.CHAMPION.encode() in sent
        found = self._replies.get(champion)
        if found is None:
            found = self._replies[champion] = self._fetch(sent)
        return found

    def _fetch(self, sent: bytes) -> list[bytes]:
        pieces: list[bytes] = []
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as connection:
            connection.sendall(sent)
            while not _whole(pieces):
                pieces.append(connection.recv(65_536))
        return pieces


def _whole(pieces: Sequence[bytes]) -> bool:
    head, _, body = b"".join(pieces).partition(HEAD_END)
    _, found, length = head.lower().partition(b"content-length: ")
    if found:
        return len(body) >= int(length.split(b"\r\n")[0])
    return body.endswith(b"0\r\n\r\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
