"""The breaker of running proxies: a canary that fails is taken out, with nothing else alive. No
ingest, no scoring, no learner and no control run here, and but for the last tests no store."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from sqlalchemy import select

from sidecar.metrics.proxy import Metrics
from sidecar.records import Arm
from sidecar.relay.reply_edit import ReplySigns
from sidecar.routing.breaker import EMPTY, ERROR, FADE, Breaker, canary_tag, memory_bytes
from sidecar.routing.table import RoutingTable, encode_table
from sidecar.store.database import Database
from sidecar.store.models import BreakerTripRow, RoutingRow
from support.fake_vllm import FakeVllm
from support.migrated_store import open_migrated
from support.proxy_kit import FreePort, StartProcess, StartProxy, Target, Wire

MODEL = "smollm2-135m"
CANARY = f"{MODEL}--v2-0123456789ab"
TABLE = RoutingTable(model=MODEL, canary=CANARY, canary_weight_bp=5_000, salt="one", generation=1)
USERS = 120


def chat(text: str, finish: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


def events(wire: Wire, *texts: str, finish: str = "stop") -> list[Any]:
    """A stream of chat: the role, these texts, the end."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text} for text in texts]
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    data = [json.dumps({"choices": [choice]}).encode() for choice in choices] + [b"[DONE]"]
    return [wire.STREAM_HEAD, *(wire.chunk(b"data: %b\n\n" % one) for one in data), wire.LAST_CHUNK]


def script(wire: Wire, bad: Callable[[bool], Sequence[Any]]) -> Callable[[Any], Sequence[Any]]:
    """The champion answers well, the canary by `bad(streams)`."""

    def answer(request: Any) -> Sequence[Any]:
        body = json.loads(request.body)
        streams = bool(body.get("stream"))
        if body["model"] == CANARY:
            return bad(streams)
        return events(wire, "Hello.") if streams else [wire.whole_reply(chat("Hello."))]

    return answer


def asked(user: int, *, streams: bool) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Hi from {user}"}]}
    return json.dumps({**body, "stream": True} if streams else body).encode()


async def good(running: Target, wire: Wire, user: int, *, streams: bool = False) -> bool:
    """Whether this user gets an answer with a text."""
    sent = wire.post(asked(user, streams=streams), headers=f"x-sidecar-session: u{user}\r\n")
    line, _, body = wire.split(await running.send(sent))
    return line == "HTTP/1.1 200 OK" and b"Hello." in body


async def hurt_users(running: Target, wire: Wire, *, streams: bool = False) -> int:
    """One request of each user, one after the other. Returns: how many got no good answer."""
    hurt = 0
    for user in range(USERS):
        hurt += not await good(running, wire, user, streams=streams)
    return hurt


BAD: dict[str, Callable[[Any], Callable[[bool], Sequence[Any]]]] = {
    "answers 500": lambda wire: lambda _: [wire.whole_reply(b"{}", "500 Internal Server Error")],
    "resets": lambda wire: lambda _: [wire.RESET],
    "closes in its head": lambda wire: lambda _: [b"HTTP/1.1 200 OK\r\nconte", wire.CLOSE],
    "says nothing": lambda wire: (
        lambda streams: events(wire) if streams else [wire.whole_reply(chat(""))]
    ),
    "says white space": lambda wire: (
        lambda streams: events(wire, " ", "\n") if streams else [wire.whole_reply(chat(" \n\t"))]
    ),
    "breaks off": lambda wire: (
        lambda streams: (
            [*events(wire)[:2], wire.RESET]
            if streams
            else [wire.whole_reply(chat("H"))[:-9], wire.RESET]
        )
    ),
    "tells of an error in its stream": lambda wire: (
        lambda streams: (
            [*events(wire)[:2], wire.chunk(b'data: {"error": {"code": 500}}\n\n'), wire.LAST_CHUNK]
            if streams
            else [wire.whole_reply(b"{}", "500 Internal Server Error")]
        )
    ),
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("how", "sample_rate"), [*((how, 1.0) for how in BAD), ("says nothing", 0.02)]
)
async def test_a_canary_that_fails_or_says_nothing_hurts_at_most_20_users(
    how: str,
    streams: bool,
    sample_rate: float,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
) -> None:
    fake_vllm.script = script(wire, BAD[how](wire))
    running = await start_proxy(capture={"sample_rate": sample_rate})
    running.proxy.routing.table = TABLE

    assert await hurt_users(running, wire, streams=streams) <= 20
    assert running.metric("sidecar_breaker_open") == 1
    asked_of_canary = sum(CANARY.encode() in request.body for request in fake_vllm.requests)
    assert 0 < asked_of_canary <= 20


async def test_who_meets_a_5xx_of_the_canary_gets_the_champions_answer(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = script(wire, BAD["answers 500"](wire))
    running = await start_proxy()
    running.proxy.routing.table = TABLE

    assert await hurt_users(running, wire) == 0
    assert running.metric("sidecar_canary_fallbacks_total") == 8
    exchanges = await running.captured(USERS)
    fallen = [one for one in exchanges if one.fallback_from]
    assert {(one.adapter, one.fallback_from) for one in fallen} == {("base", CANARY)}
    assert len(fallen) == 8


async def test_an_engine_that_fails_on_our_fields_is_no_fault_of_the_canary(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    def answer(request: Any) -> Sequence[Any]:
        if json.loads(request.body).get("logprobs"):
            return [wire.whole_reply(b"{}", "500 Internal Server Error")]
        return [wire.whole_reply(chat("Hello."))]

    fake_vllm.script = answer
    running = await start_proxy()
    running.proxy.routing.table = TABLE

    assert await hurt_users(running, wire) == 0

    assert running.metric("sidecar_canary_fallbacks_total") == 0
    assert running.metric("sidecar_bad_replies_total", arm="canary", kind="error") == 0
    assert running.metric("sidecar_adapter_replies_total", adapter=CANARY, arm="canary") > 20
    assert len(fake_vllm.requests) == USERS + 3  # three refusals, then it is asked plainly at once


async def test_a_5xx_needs_no_end_for_the_champion_to_answer(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    head = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 100000000\r\n\r\n"
    fake_vllm.script = script(wire, lambda _: [head + b"x", asyncio.Event()])
    running = await start_proxy()
    running.proxy.routing.table = TABLE

    assert await hurt_users(running, wire) == 0
    assert running.metric("sidecar_breaker_open") == 1


async def test_a_stream_that_the_champion_replaces_is_not_counted_as_open(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    head = (
        b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/event-stream\r\n"
        b"content-length: 10\r\n\r\n"
    )
    fake_vllm.script = script(wire, lambda _: [head + b"data: {}\n\n"])
    running = await start_proxy()
    running.proxy.routing.table = TABLE

    assert await hurt_users(running, wire, streams=True) == 0
    assert running.metric("sidecar_canary_fallbacks_total") == 8
    assert running.metric("sidecar_streams_open") == 0


async def test_a_canary_that_stalls_in_its_stream_is_taken_out_while_its_clients_wait(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = script(wire, lambda _: [*events(wire)[:2], asyncio.Event()])
    running = await start_proxy(proxy={"slow_first_byte_s": 0.05, "idle_timeout_s": 0.2})
    running.proxy.routing.table = TABLE
    writers = []
    for user in range(60):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        headers = f"x-sidecar-session: u{user}\r\n"
        writer.write(wire.post(asked(user, streams=True), headers=headers))
        writers.append(writer)

    await running.metric_reaches(1, "sidecar_breaker_trips_total", kind="slow")

    for writer in writers:
        writer.transport.abort()
    await running.metric_reaches(0, "sidecar_requests_in_flight")


async def test_a_5xx_of_the_champion_is_passed_on(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(b'{"error":"x"}', "503 Service Unavailable")]
    running = await start_proxy()
    running.proxy.routing.table = TABLE
    for user in range(USERS):
        sent = wire.post(asked(user, streams=False), headers=f"x-sidecar-session: u{user}\r\n")
        line, _, body = wire.split(await running.send(sent))
        assert (line, body) == ("HTTP/1.1 503 Service Unavailable", b'{"error":"x"}')

    assert running.metric("sidecar_breaker_open") == 0, "both fail: it is not the canary's doing"


async def test_a_canary_that_hangs_is_taken_out_by_the_clients_that_give_up(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    forever, reached = asyncio.Event(), asyncio.Event()

    def hang(_: bool) -> Sequence[Any]:
        reached.set()
        return [forever]

    fake_vllm.script = script(wire, hang)
    running = await start_proxy()
    running.proxy.routing.table = TABLE
    hurt = 0
    for user in range(USERS):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        headers = f"x-sidecar-session: u{user}\r\n"
        writer.write(wire.post(asked(user, streams=False), headers=headers))
        reached.clear()
        reply, hangs = asyncio.create_task(reader.read()), asyncio.create_task(reached.wait())
        await asyncio.wait((reply, hangs), return_when=asyncio.FIRST_COMPLETED)
        hurt += hangs.done()
        writer.transport.abort()
        for task in (reply, hangs):
            task.cancel()
        await asyncio.gather(reply, hangs, return_exceptions=True)
        await running.metric_reaches(0, "sidecar_requests_in_flight")

    assert hurt == 8
    assert running.metric("sidecar_bad_replies_total", arm="canary", kind="cut") == 8
    assert running.metric("sidecar_breaker_trips_total", kind="cut") == 1


def test_users_who_all_share_one_session_take_a_bad_canary_out_too() -> None:
    """An agent that sends the same first user message, or one session header, for everybody."""
    breaker, replies = Breaker(Metrics()), 0
    breaker.follow(TABLE)
    while not breaker.is_open:
        breaker.reply(canary_tag(TABLE), "canary", "one", EMPTY)
        replies += 1

    # Nobody is left for the champion, whose rate is not known: 14 counted replies, not 8.
    assert replies == 1 + 13 * FADE


def test_one_session_counts_alike_however_many_workers_answer_it() -> None:
    memory = memoryview(bytearray(memory_bytes(8)))
    workers = [Breaker(Metrics(), memory, row, 8) for row in range(8)]
    for worker in workers:
        worker.follow(TABLE)
    tag = canary_tag(TABLE)
    for user in range(500):
        workers[user % 8].reply(tag, "champion", f"c{user}", 0)
    for number in range(1_000):
        workers[number % 8].reply(tag, "canary", f"a{number}", 0)
        workers[number % 8].reply(tag, "canary", "hopeless", EMPTY)

    assert not workers[0].is_open


@pytest.mark.parametrize(("turns", "workers"), [(3, 1), (20, 4)])
def test_users_who_are_bad_on_either_arm_do_not_condemn_an_equal_canary(
    turns: int, workers: int
) -> None:
    """A tenth of all sessions is cut short in every turn, whichever arm answers."""
    rng = random.Random(7)
    out = 0
    for ramp in range(100):
        memory = memoryview(bytearray(memory_bytes(workers)))
        breakers = [Breaker(Metrics(), memory, row, workers) for row in range(workers)]
        for one in breakers:
            one.follow(TABLE)
        tag = canary_tag(TABLE)
        open_sessions: list[tuple[str, Arm, int, list[int]]] = []
        for number in range(800):
            if len(open_sessions) < 20:
                arm: Arm = "canary" if rng.random() < 0.5 else "champion"
                bad = EMPTY if rng.random() < 0.1 else 0
                open_sessions.append((f"{ramp}-{number}", arm, bad, [turns]))
            session = rng.choice(open_sessions)
            key, arm, bad, left = session
            breakers[number % workers].reply(tag, arm, key, bad)
            left[0] -= 1
            if not left[0]:
                open_sessions.remove(session)
        out += breakers[0].is_open

    assert out <= 1


async def test_the_next_canary_starts_anew(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = script(wire, BAD["says nothing"](wire))
    running = await start_proxy()
    running.proxy.routing.table = TABLE
    await hurt_users(running, wire)

    # The same canary at another step is still out; after a resume it has another salt.
    running.proxy.routing.table = replace(TABLE, canary_weight_bp=9_999, generation=2)
    assert await hurt_users(running, wire) == 0
    running.proxy.routing.table = replace(TABLE, salt="two", generation=3)
    assert 0 < await hurt_users(running, wire) <= 20


def test_the_workers_of_one_memory_count_together_and_obey_each_other() -> None:
    memory = memoryview(bytearray(memory_bytes(2)))
    told: list[str] = []
    first, second = (
        Breaker(Metrics(), memory, row, 2, lambda table, reason: told.append(reason))
        for row in range(2)
    )
    for worker in (first, second):
        worker.follow(TABLE)
    tag = canary_tag(TABLE)
    for user in range(50):
        first.reply(tag, "champion", f"c{user}", 0)
    for user in range(4):
        assert not first.is_open
        first.reply(tag, "canary", f"a{user}", EMPTY)
        second.reply(tag, "canary", f"b{user}", EMPTY)

    assert (first.is_open, second.is_open) == (True, True)
    assert told == [
        "8 of the canary's last 8 replies were bad (empty), 0 of the champion's 50 in the same "
        "time; first ones of 8 callers"
    ]


def test_a_worker_that_takes_the_place_of_a_dead_one_goes_on_with_its_counts() -> None:
    memory = memoryview(bytearray(memory_bytes(1)))
    dead = Breaker(Metrics(), memory)
    dead.follow(TABLE)
    tag = canary_tag(TABLE)
    for user in range(60):
        dead.reply(tag, "champion", f"c{user}", 0)
    for user in range(7):
        dead.reply(tag, "canary", f"a{user}", ERROR)
    successor = Breaker(Metrics(), memory)
    successor.follow(TABLE)
    assert not successor.is_open

    successor.reply(tag, "canary", "a7", ERROR)

    assert successor.is_open


def test_replies_of_an_earlier_canary_are_left_out() -> None:
    breaker = Breaker(Metrics())
    breaker.follow(replace(TABLE, salt="two"))
    tag = canary_tag(TABLE)
    for user in range(30):
        breaker.reply(tag, "canary", f"a{user}", ERROR)

    assert not breaker.is_open


@pytest.mark.parametrize(
    "body",
    [
        chat("Hello"),
        b'{"content":[{"type":"text","text":"Hi"}]}',
        b'{"content":[{"type":"tool_use","name":"f","input":{}}]}',
        b'{"choices":[{"message":{"content":null,"tool_calls":[{"function":'
        b'{"name":"f","arguments":"{}"}}]}}]}',
        b'data: {"choices":[{"delta":{"content":"\\u00e4"}}]}\n\n',
        b'event: response.output_text.delta\ndata: {"delta":"H"}\n\n',
        b'{"choices":[{"message":{"content":"' + b" \\n" * 200 + b'said"}}]}',
        b'{"choices":[{"message":{"content":null,"tool_calls":[{"function":'
        b'{"name":"f","arguments":""}}]}}]}',
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_reply_that_says_something_is_known_however_it_is_cut(body: bytes, size: int) -> None:
    signs = ReplySigns()
    for at in range(0, len(body), size):
        signs.feed(body[at : at + size])

    assert (signs.says_something, signs.cut_short, signs.failed) == (True, False, False)


@given(st.lists(st.sampled_from(['"', "\\", " ", "\n", "\t", "\b", "a", "é", '"content":"'])))
def test_a_text_of_more_than_white_space_says_something(pieces: list[str]) -> None:
    text = "".join(pieces)
    for written in (chat(text), json.dumps(json.loads(chat(text)), separators=(",", ":")).encode()):
        signs = ReplySigns()
        signs.feed(written)

        assert signs.says_something == bool(text.strip(" \n\t\b"))


@pytest.mark.parametrize(
    "body",
    [
        chat(""),
        b'{"choices":[{"message":{"content":null,"reasoning_content":"I think"}}]}',
        b'{"choices":[{"message":{"content":null},"logprobs":{"content":[{"token":"x"}]}}]}',
        b'{"content":[{"type":"thinking","thinking":"Hm"}]}',
    ],
)
def test_a_reply_that_says_nothing_is_known(body: bytes) -> None:
    signs = ReplySigns()
    signs.feed(body)

    assert not signs.says_something


def test_what_a_model_quotes_is_not_taken_for_a_sign() -> None:
    quoted = (
        '"finish_reason":"length"\ndata: {"error": 1}\nevent: error\n"stop_reason":"max_tokens"'
    )
    signs = ReplySigns()
    signs.feed(chat(quoted))

    assert (signs.says_something, signs.cut_short, signs.failed) == (True, False, False)


@pytest.mark.parametrize(
    "body",
    [
        chat("Hello", "length"),
        b'{"content":[{"text":"Hi"}],"stop_reason":"max_tokens"}',
        b'data: {"response":{"status":"incomplete"}}\n\n',
    ],
)
def test_a_reply_that_the_token_limit_ended_is_known(body: bytes) -> None:
    signs = ReplySigns()
    signs.feed(body[:-9])
    signs.feed(body[-9:])

    assert signs.cut_short


@pytest.fixture
def database(state_dir: Path) -> Iterator[Database]:
    database = open_migrated(state_dir / "store.db")
    with database.write() as session:
        body = encode_table(TABLE)
        session.add(RoutingRow(model=MODEL, generation=1, body=body, updated_at=0.0))
    yield database
    database.close()


async def trip_of(database: Database) -> BreakerTripRow:
    async with asyncio.timeout(60):
        while True:
            with database.read() as session:
                row: BreakerTripRow | None = session.scalar(select(BreakerTripRow))
                if row is not None:
                    session.expunge(row)
                    return row
            await asyncio.sleep(0.01)


async def test_the_store_is_told_and_tells_other_proxies_and_later_ones(
    database: Database,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    free_port: FreePort,
    wire: Wire,
) -> None:
    fake_vllm.script = script(wire, BAD["says nothing"](wire))
    one = await start_proxy(proxy={"port": free_port(), "routing_poll_s": 0.01})
    other = await start_proxy(proxy={"port": free_port(), "routing_poll_s": 0.01})
    assert 0 < await hurt_users(one, wire) <= 20

    row = await trip_of(database)

    assert (row.model, row.canary, row.salt) == (MODEL, CANARY, "one")
    assert "bad (empty)" in row.reason
    async with asyncio.timeout(60):
        while not other.proxy.breaker.is_out(TABLE):
            await asyncio.sleep(0.01)
    assert await hurt_users(other, wire) == 0
    later = await start_proxy(proxy={"port": free_port()})
    assert await hurt_users(later, wire) == 0


async def test_a_trip_is_stored_when_the_store_is_back(
    database: Database, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire, state_dir: Path
) -> None:
    fake_vllm.script = script(wire, BAD["says nothing"](wire))
    running = await start_proxy()
    store, away = state_dir / "store.db", state_dir / "away"
    away.mkdir()
    for file in state_dir.glob("store.db*"):
        file.rename(away / file.name)
    await hurt_users(running, wire)
    assert running.metric("sidecar_breaker_open") == 1
    for file in away.glob("store.db*"):
        file.rename(state_dir / file.name)
    assert store.exists()

    assert (await trip_of(database)).canary == CANARY


async def test_all_workers_take_the_canary_out_together(
    database: Database, fake_vllm: FakeVllm, start_process: StartProcess, wire: Wire
) -> None:
    """Three processes, each with a third of the requests: eight bad replies in all are enough."""
    fake_vllm.script = script(wire, BAD["says nothing"](wire))
    service = await start_process(proxy={"workers": 3})
    async with asyncio.timeout(60):
        while sum('"proxy_ready"' in line for line in service.lines) < 3:
            await asyncio.sleep(0.05)

    assert 0 < await hurt_users(service, wire) <= 20

    assert sum(CANARY.encode() in request.body for request in fake_vllm.requests) <= 20
    trips = [line for line in service.lines if '"canary_taken_out"' in line]
    assert len(trips) == 1
    assert (await trip_of(database)).canary == CANARY
    metrics = await service.metrics()
    assert metrics['sidecar_breaker_trips_total{kind="empty"}'] == 1


async def test_a_proxy_that_starts_again_keeps_the_canary_out_without_a_store(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire, free_port: FreePort
) -> None:
    fake_vllm.script = script(wire, BAD["says nothing"](wire))
    running = await start_proxy()
    running.proxy.routing.table = TABLE
    assert 0 < await hurt_users(running, wire) <= 20

    again = await start_proxy(proxy={"port": free_port()})
    again.proxy.routing.table = TABLE

    assert await hurt_users(again, wire) == 0
