"""The socket of best of N: who may reach it, who holds it, and the whole way of one question."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import select

from ingest.best_of import BestOfJudge, BestOfServer
from sidecar.scoring import Material, NoPick, Pick, SocketPicker, socket_path
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import BestOfScoreRow
from sidecar.unix_socket import kernel_path
from support.fake_judge import FakeJudge, score_by_content
from tests.ingest.conftest import until

SCORES = score_by_content({"good": 0.9, "bad": 0.1})
QUESTION = Material(
    exchange_id="ex_1",
    request=b'{"messages":[{"role":"user","content":"hi"}]}',
    answers=(b'{"content":"bad"}', b'{"content":"good"}'),
    keep=True,
)

Start = Callable[..., Awaitable[tuple[BestOfServer, asyncio.Event]]]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Longer than the path of a unix socket may be."""
    folder = tmp_path / ("folder-" * 20)
    folder.mkdir()
    return folder


@pytest.fixture
async def start(database: Database, state_dir: Path) -> AsyncIterator[Start]:
    """Start a server, by default with a judge that scores by content; wait until it listens."""
    running: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def begin(judge: Any = None, *, wait: bool = True) -> tuple[BestOfServer, asyncio.Event]:
        judge = judge or FakeJudge(SCORES)
        settings = Settings(judge={"model": "scripted"}, best_of={"enabled": True})
        server = BestOfServer(socket_path(state_dir), BestOfJudge(database, judge, settings))
        stop = asyncio.Event()
        task = asyncio.create_task(server.run(stop))
        running.append((stop, task))
        if wait:
            await until(lambda: socket_path(state_dir).is_socket())
        return server, stop

    yield begin
    for stop, task in running:
        stop.set()
        async with asyncio.timeout(60):
            await task


def picker(state_dir: Path) -> SocketPicker:
    return SocketPicker(socket_path(state_dir), concurrency=4, max_waiting=4)


async def ask(state_dir: Path) -> Any:
    """Ask until somebody listens: the socket's file is there a moment before."""
    async with asyncio.timeout(60):
        while (found := await picker(state_dir).pick(QUESTION, 5.0)) == NoPick(reason="away"):
            await asyncio.sleep(0.005)
    return found


async def test_a_question_goes_over_a_socket_of_this_user(start: Start, state_dir: Path) -> None:
    path = socket_path(state_dir)
    path.touch()  # as a killed process leaves it

    _, stop = await start()

    assert await ask(state_dir) == Pick(index=1, scores=(0.1, 0.9))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stop.set()
    await until(lambda: not path.exists())


async def test_an_asker_that_leaves_does_not_stop_the_judgement(
    start: Start, state_dir: Path, database: Database
) -> None:
    inner = FakeJudge(SCORES)
    asked, go = asyncio.Event(), asyncio.Event()

    class SlowJudge:
        model = "scripted"

        async def complete(self, messages: Any, schema: Any) -> Any:
            asked.set()
            await go.wait()
            return await inner.complete(messages, schema)

    await start(SlowJudge())
    asking = asyncio.create_task(ask(state_dir))
    await asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    go.set()

    def waiting() -> list[str]:
        with database.read() as session:
            return list(session.scalars(select(BestOfScoreRow.exchange_id)))

    await until(lambda: waiting() == ["ex_1"])


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x01\xc1", b"\x00\x00"])
async def test_no_question_is_hung_up_on(sent: bytes, start: Start, state_dir: Path) -> None:
    await start()
    assert isinstance(await ask(state_dir), Pick)

    with structlog.testing.capture_logs() as events:
        with kernel_path(socket_path(state_dir)) as name:
            reader, writer = await asyncio.open_unix_connection(name)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    assert [e["event"] for e in events] == ["best_of_question_refused"]
    assert isinstance(await ask(state_dir), Pick)


async def test_of_two_one_listens_and_the_other_takes_over(
    start: Start, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.best_of.TAKE_OVER_S", 0.01)
    first = FakeJudge(SCORES)
    second = FakeJudge(SCORES)
    _, stop = await start(first)
    await ask(state_dir)
    with structlog.testing.capture_logs() as events:
        await start(second, wait=False)
        await until(lambda: any(e["event"] == "best_of_waits" for e in events))
    await ask(state_dir)
    assert (len(first.conversations), len(second.conversations)) == (2, 0)

    stop.set()
    async with asyncio.timeout(60):
        while not second.conversations:
            await picker(state_dir).pick(QUESTION, 5.0)
            await asyncio.sleep(0.005)

    assert not [event for event in events if event["event"] == "best_of_question_refused"]


@pytest.mark.tier_2
def test_the_scoring_process_listens_when_it_is_on(tmp_path: Path, state_dir: Path) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(
        f'state_dir = "{state_dir}"\n'
        '[serving]\nupstreams = ["http://127.0.0.1:9"]\n'
        f'[store]\nurl = "sqlite:///{tmp_path}/store.db"\n'
        "[telemetry]\nlog_json = true\n"
        '[judge]\nmodel = "openai/x"\napi_base = "http://127.0.0.1:9/v1"\n'
        "[best_of]\nenabled = true\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "ingest.score", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        names = (json.loads(line)["event"] for line in process.stderr)
        assert "best_of_listens" in names
        assert socket_path(state_dir).is_socket()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 0
    assert not socket_path(state_dir).exists()
