"""The two C programs against known answers: what the fake says, and what the load counts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.relay import ours
from benchmarks.relay.ends import Ends, LoadReport, build, run_load
from benchmarks.relay.scenarios import (
    BY_NAME,
    MODEL,
    SCENARIOS,
    Scenario,
    body,
    request,
    write_requests,
)
from benchmarks.relay.stage import upstream

RECORDED = Path(__file__).resolve().parents[1] / "sidecar" / "recorded"
CORE = min(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("gcc", "cc", "clang")),
    reason="no C compiler for the load generator",
)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return build(tmp_path_factory.mktemp("ends"))


@pytest.fixture(scope="module")
def port(ends: Ends) -> Iterator[int]:
    with upstream(ends, CORE, [MODEL, ours.CHAMPION]) as (port, _):
        yield port


def ask(port: int, **members: object) -> bytes:
    content = json.dumps({"model": MODEL, "messages": [], **members}).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, content), timeout=60) as reply:
        found: bytes = reply.read()
        return found


def shape(value: Any) -> Any:
    """Names and kinds, without the values; of a list the first item's."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None if value is None else type(value).__name__


def shapes(stream: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
    return [shape(json.loads(line)) if line != b"[DONE]" else "[DONE]" for line in lines]


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({}, "whole_reply_plain.json"),
        ({"logprobs": True, "return_token_ids": True}, "whole_reply_asked.json"),
    ],
)
def test_a_reply_has_the_shape_of_the_real_one(
    port: int, asked: dict[str, bool], recorded: str
) -> None:
    real = json.loads((RECORDED / recorded).read_bytes())

    assert shape(json.loads(ask(port, **asked))) == shape(real)


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({}, "whole_stream_plain.sse"),
        ({"logprobs": True, "return_token_ids": True}, "whole_stream_asked.sse"),
    ],
)
def test_a_stream_has_the_shape_of_the_real_one(
    port: int, asked: dict[str, bool], recorded: str
) -> None:
    real = shapes((RECORDED / recorded).read_bytes())

    fake = shapes(ask(port, stream=True, max_tokens=6, seed=100, **asked))

    assert len(fake) == 6 + 2
    assert (fake[0], fake[1], fake[-2], fake[-1]) == (real[0], real[1], real[-2], real[-1])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_a_request_is_as_long_as_it_says_and_the_same_each_time(scenario: Scenario) -> None:
    content = body(scenario, 1)
    told = json.loads(content)

    prompt = sum(len(message["content"]) for message in told["messages"])
    assert scenario.prompt_bytes <= prompt <= scenario.prompt_bytes + 100
    assert content == body(scenario, 1)
    assert content != body(scenario, 2)


def load(
    ends: Ends, folder: Path, port: int, requests: Sequence[bytes], *, connections: int = 1
) -> LoadReport:
    """Load for a third of a second, or for as long as it takes a busy machine to show anything."""
    write_requests(folder / "requests.bin", requests)
    for seconds in ("0.3", "1", "3", "9"):
        command = [str(ends.load), str(port), str(connections), "0", seconds, "0"]
        command.append(str(folder / "requests.bin"))
        report = run_load(command, limit_s=10, at_begin=lambda: None, at_end=lambda: None)
        if report.requests + report.refused + report.broken >= len(requests):
            return report
    raise AssertionError(f"nothing came in {seconds} s")


def of(scenario: str, **asks: object) -> bytes:
    content = json.loads(body(BY_NAME[scenario], 0)) | asks
    return request("/v1/chat/completions", "a", "key", json.dumps(content).encode())


def test_the_load_counts_each_event_of_each_stream(ends: Ends, port: int, tmp_path: Path) -> None:
    report = load(ends, tmp_path, port, [of("sse8", max_tokens=20, seed=500)], connections=4)

    assert (report.fewest_events, report.most_events) == (22, 22)
    # What ended in the window, and what had come of the four that had not.
    assert 22 * report.requests <= report.events <= 22 * (report.requests + 4)
    assert report.requests > 0
    assert (report.refused, report.broken) == (0, 0)


Play = Callable[[socket.socket], None]


@contextmanager
def server(play: Play) -> Iterator[int]:
    """Reads each request to its end, then plays; closes the connection when `play` raises."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):  # the load leaves when its time is over
            while data := connection.recv(1 << 16):
                if data.endswith(b"END"):
                    play(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


PLAIN = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nEND"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_stream_cut_at_every_byte_is_counted_as_whole(ends: Ends, tmp_path: Path) -> None:
    stream = STREAM + b"a\r\ndata: a\n\nd\r\n4\r\nata:\r\n6\r\n [b]\n\n\r\n0\r\n\r\n"

    def play(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(len(stream)):
            connection.sendall(stream[i : i + 1])

    with server(play) as port:
        report = load(ends, tmp_path, port, [PLAIN])

    assert (report.fewest_events, report.most_events) == (2, 2)
    assert report.requests > 0


def test_a_reply_that_is_cut_is_broken_and_not_a_reply(ends: Ends, tmp_path: Path) -> None:
    def play(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}")
        raise ConnectionError

    with server(play) as port:
        report = load(ends, tmp_path, port, [PLAIN])

    assert report.broken > 0
    assert report.requests == 0
