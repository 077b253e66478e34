"""Asking which answer is the best: one contract for fake and real, and all that goes wrong."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.scoring import (
    FAILURES_IN_A_ROW,
    MAX_QUESTION_BYTES,
    MAX_REPLY_BYTES,
    Material,
    NoPick,
    Pause,
    Pick,
    Picker,
    SocketPicker,
    Verdict,
    WireError,
    encode_frame,
    read_frame,
    read_material,
    read_verdict,
)
from support.proxy_kit import Wire
from support.virtual_time import VirtualLoop

QUESTION = Material(
    exchange_id="ex_1", request=b'{"messages":[]}', answers=(b"{}", b"{}"), keep=True
)
PICK = Pick(index=1, scores=(0.25, 0.75))
LONG_S = 30.0
"""A limit that no test waits for."""

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedScoring:
    """A server at the socket that plays one function a connection, the last one again and again."""

    def __init__(self, path: Path, *plays: Play) -> None:
        self.path = path
        self.plays = list(plays)
        self.asked: list[Material] = []
        self.connections = 0
        self.left = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        play = self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        frame = await read_frame(reader, limit=MAX_QUESTION_BYTES)
        self.asked.append(read_material(frame))
        await play(reader, writer)
        writer.close()


def say(data: bytes) -> Play:
    async def play(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return play


async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()  # until the asker leaves


StartScoring = Callable[..., Awaitable[ScriptedScoring]]
Build = Callable[..., Awaitable[Picker]]


@pytest.fixture
async def scoring(state_dir: Path) -> AsyncIterator[StartScoring]:
    started: list[ScriptedScoring] = []

    async def start(*plays: Play) -> ScriptedScoring:
        started.append(ScriptedScoring(state_dir / "b.sock", *plays))
        await started[-1].start()
        return started[-1]

    yield start
    for one in started:
        await one.stop()


def picker_at(path: Path, **changes: Any) -> SocketPicker:
    return SocketPicker(path, **{"concurrency": 4, "max_waiting": 4, **changes})


@pytest.fixture(params=["memory", "socket"])
def build(
    request: pytest.FixtureRequest, scoring: StartScoring, state_dir: Path, wire: Wire
) -> Build:
    """Make a picker that meets these verdicts; None is one that never comes."""

    async def memory(*verdicts: Verdict | None) -> Picker:
        return wire.Picker(*(asyncio.Event() if each is None else each for each in verdicts))

    async def socket(*verdicts: Verdict | None) -> Picker:
        plays = [hang if each is None else say(encode_frame(each)) for each in verdicts]
        await scoring(*plays)
        return picker_at(state_dir / "b.sock")

    return memory if request.param == "memory" else socket


# -- the contract


async def test_the_pick_comes_back(build: Build) -> None:
    picker = await build(PICK)

    assert picker.ready
    assert await picker.pick(QUESTION, LONG_S) == PICK


async def test_a_reason_comes_back(build: Build) -> None:
    picker = await build(NoPick(reason="identical_answers"), PICK)

    assert await picker.pick(QUESTION, LONG_S) == NoPick(reason="identical_answers")
    assert await picker.pick(QUESTION, LONG_S) == PICK


async def test_a_verdict_that_does_not_come_is_a_timeout(build: Build) -> None:
    picker = await build(None)

    assert await picker.pick(QUESTION, 0.01) == NoPick(reason="timeout")


async def test_waiting_can_be_cancelled(build: Build) -> None:
    picker = await build(None)
    asking = asyncio.create_task(picker.pick(QUESTION, LONG_S))
    await asyncio.sleep(0)

    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking


# -- the limit, in virtual time


@pytest.mark.parametrize("slow", ["no verdict", "one byte a second", "no slot"])
def test_no_judge_however_slow_delays_past_the_limit(slow: str, state_dir: Path) -> None:
    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in encode_frame(PICK):
            writer.write(bytes([byte]))
            await asyncio.sleep(1.0)

    async def ask() -> tuple[Verdict, float]:
        loop = asyncio.get_running_loop()
        server = ScriptedScoring(state_dir / "b.sock", drip if slow.startswith("one") else hang)
        await server.start()
        picker = picker_at(server.path, concurrency=1)
        others = []
        if slow == "no slot":
            others.append(asyncio.create_task(picker.pick(QUESTION, 1e6)))
            await asyncio.sleep(0)
        began = loop.time()
        verdict = await picker.pick(QUESTION, 5.0)
        took_s = loop.time() - began
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await server.stop()
        await asyncio.sleep(60)  # everything closes what it holds
        return verdict, took_s

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        verdict, took_s = runner.run(ask())

    assert verdict == NoPick(reason="timeout")
    assert took_s == pytest.approx(5.0)


# -- what goes wrong on the socket


async def test_without_a_socket_nobody_is_there(state_dir: Path) -> None:
    picker = picker_at(state_dir / "none.sock")

    assert await picker.pick(QUESTION, LONG_S) == NoPick(reason="away")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "disconnect"),
        (encode_frame(PICK)[:-1], "disconnect"),
        (b"HTTP/1.1 200 OK\r\n", "garbage"),
        (struct.pack(">I", MAX_REPLY_BYTES + 1), "garbage"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "garbage"),
        (encode_frame(Pick(index=2, scores=(0.1, 0.2))), "garbage"),
        (encode_frame(Pick(index=-1, scores=(0.1, 0.2))), "garbage"),
        (encode_frame(Pick(index=0, scores=(0.1,))), "garbage"),
        (encode_frame(Pick(index=0, scores=(7.0, 0.2))), "garbage"),
        (encode_frame(Pick(index=0, scores=(float("nan"), 0.2))), "garbage"),
        (encode_frame(NoPick(reason="because")), "garbage"),
    ],
)
async def test_what_is_not_a_verdict_is_told_apart(
    sent: bytes, reason: str, scoring: StartScoring, state_dir: Path
) -> None:
    await scoring(say(sent))

    assert await picker_at(state_dir / "b.sock").pick(QUESTION, LONG_S) == NoPick(reason=reason)


async def test_a_reset_connection_is_a_disconnect(scoring: StartScoring, state_dir: Path) -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    await scoring(reset)

    verdict = await picker_at(state_dir / "b.sock").pick(QUESTION, LONG_S)

    assert verdict == NoPick(reason="disconnect")


async def test_a_question_that_is_too_large_is_not_asked(
    scoring: StartScoring, state_dir: Path
) -> None:
    server = await scoring(say(encode_frame(PICK)))
    large = Material(
        exchange_id="ex", request=b"x" * MAX_QUESTION_BYTES, answers=(b"a", b"b"), keep=True
    )

    assert await picker_at(state_dir / "b.sock").pick(large, LONG_S) == NoPick(reason="too_large")
    assert server.connections == 0


async def test_the_question_arrives_as_it_was_asked(scoring: StartScoring, state_dir: Path) -> None:
    server = await scoring(say(encode_frame(PICK)))

    await picker_at(state_dir / "b.sock").pick(QUESTION, LONG_S)

    assert server.asked == [QUESTION]


async def test_a_cancelled_question_lets_go_of_its_connection_and_its_slot(
    scoring: StartScoring, state_dir: Path
) -> None:
    reached, left = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        reached.set()
        await reader.read()
        left.set()

    await scoring(wait, say(encode_frame(PICK)))
    picker = picker_at(state_dir / "b.sock", concurrency=1, max_waiting=0)
    asking = asyncio.create_task(picker.pick(QUESTION, LONG_S))
    await reached.wait()
    assert not picker.ready
    assert await picker.pick(QUESTION, LONG_S) == NoPick(reason="queue_full")

    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async with asyncio.timeout(60):
        await left.wait()
    assert picker.ready
    assert await picker.pick(QUESTION, LONG_S) == PICK


async def test_no_more_are_asked_at_once_than_allowed(
    scoring: StartScoring, state_dir: Path
) -> None:
    open_now = most = 0

    async def one(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        writer.write(encode_frame(PICK))

    await scoring(one)
    picker = picker_at(state_dir / "b.sock", concurrency=2, max_waiting=6)

    verdicts = await asyncio.gather(*(picker.pick(QUESTION, LONG_S) for _ in range(8)))

    assert verdicts == [PICK] * 8
    assert most <= 2


async def test_after_a_few_failures_in_a_row_it_is_not_ready_for_a_while(state_dir: Path) -> None:
    now = 100.0
    picker = picker_at(state_dir / "none.sock", clock=lambda: now)

    for _ in range(FAILURES_IN_A_ROW):
        assert picker.ready
        await picker.pick(QUESTION, LONG_S)

    assert not picker.ready
    now += 1.0
    assert picker.ready


def test_the_pause_doubles_each_time_that_it_was_over_and_a_success_ends_it() -> None:
    now = 0.0
    pause = Pause(lambda: now)
    lengths = []
    for _ in range(FAILURES_IN_A_ROW - 1):
        pause.note(failed=True)
    for _ in range(7):
        pause.note(failed=True)
        pause.note(failed=True)  # one that was in flight at the same time
        began = now
        while pause.lasts:
            now += 0.5
        lengths.append(now - began)

    assert lengths == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]

    pause.note(failed=False)
    pause.note(failed=True)
    assert not pause.lasts


@pytest.mark.parametrize("answers", [0, 1, 9])
def test_a_question_has_two_to_eight_answers(answers: int) -> None:
    frame = encode_frame(
        Material(exchange_id="e", request=b"", answers=(b"{}",) * answers, keep=True)
    )

    with pytest.raises(WireError, match=f"{answers} answers"):
        read_material(frame[4:])


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"])
def test_what_is_neither_question_nor_verdict_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        read_material(body)
    with pytest.raises(WireError):
        read_verdict(body, answers=2)
