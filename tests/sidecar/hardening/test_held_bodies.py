"""What the bodies of requests hold of a worker: memory, a place, and a key's requests."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sidecar.relay.client import MIN_BODY_BYTES_PER_S, BodyWatch, ClientConnection
from sidecar.relay.context import FREE_BYTES
from sidecar.relay.request_parser import RequestParser
from sidecar.store.database import Database
from support import api_keys
from support.memory import traced_bytes
from support.migrated_store import open_migrated
from support.proxy_kit import Running, StartProxy, Wire
from support.strict_peers import Connect, Dial, StrictVllm

LONG_S = 60.0
"""A limit that a test must not run into."""
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MB = 2**20


def announced(length: int, *fields: bytes) -> bytes:
    return b"".join(
        (HEAD, *(b"%b\r\n" % one for one in fields), b"Content-Length: %d" % length)
    ) + (b"\r\n\r\n")


def question(size: int) -> bytes:
    """A request body of so many bytes."""
    empty = b'{"model":"smollm2-135m","messages":[],"x":"%b"}'
    return empty % (b"y" * (size - len(empty) + 2))


class Brought(Dial):
    """A client on a connection of its own; `relays` is the relay's end of it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        relays: ClientConnection,
    ) -> None:
        super().__init__(reader, writer)
        self.relays = relays


Bring = Callable[[Running], Awaitable[Brought]]


async def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.001)


def has_come(fake_vllm: StrictVllm, number: int) -> bool:
    return len(fake_vllm.requests) == number


async def until_admitted(client: Brought) -> None:
    await until(lambda: client.relays._watch._admitted is not None)


@pytest.fixture
def bring(start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm) -> Bring:
    async def connect(running: Running) -> Brought:
        known = set(running.proxy._relay._connections)
        client = await dial(running)
        await until(lambda: len(running.proxy._relay._connections) > len(known))
        [relays] = running.proxy._relay._connections - known
        return Brought(client.reader, client.writer, relays)

    return connect


def held_by(running: Running) -> int:
    """Bytes that are really held for bodies that are coming in."""
    total = 0
    for connection in running.proxy._relay._connections:
        if connection._parser.body_bytes > FREE_BYTES and not connection._closing:
            total += connection._parser.body_bytes
    return total


# -- small chunks


@pytest.mark.parametrize("size", [1, 2, 16, 1000])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_in_small_pieces_holds_a_small_multiple_of_its_bytes(
    size: int, chunked: bool
) -> None:
    """Two bytes a chunk once held 27 times their size."""
    body, parser = bytes(100_000), RequestParser(max_body_bytes=MB)
    parser.feed(CHUNKED if chunked else announced(len(body)))
    pieces = len(body) // size
    tracemalloc.start()

    for number in range(pieces - 1):
        piece = body[number * size : (number + 1) * size]
        parser.feed(b"%x\r\n%b\r\n" % (size, piece) if chunked else piece)
    held = traced_bytes("/sidecar/relay/", "/test_held_bodies.py")
    tracemalloc.stop()

    assert parser.body_bytes == (pieces - 1) * size
    assert 0 < held < 1.5 * len(body) + 10_000  # what a parser holds besides
    last = body[(pieces - 1) * size :]
    parser.feed(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if chunked else last)
    [request] = parser.ready
    assert request.body == body


# -- the budget


async def test_unfinished_bodies_hold_no_more_than_the_budget_and_the_rest_come_again(
    start_proxy: StartProxy, bring: Bring
) -> None:
    """They announce more than they send, as who wants to hold memory does."""
    running = await start_proxy(
        proxy={
            "max_body_bytes": MB,
            "held_bodies": 2,
            "body_timeout_s": LONG_S,
            "write_timeout_s": LONG_S,
        }
    )
    most = 0
    clients = [await bring(running) for _ in range(12)]
    for client in clients:
        client.say(announced(MB))
    for _ in range(6):
        for client in clients:
            if not client.writer.is_closing():
                client.say(bytes(100_000))
        for _ in range(20):
            await asyncio.sleep(0.001)
            most = max(most, held_by(running))
    await until(
        lambda: not any(c._parser.body_bytes == 0 for c in running.proxy._relay._connections)
    )

    assert MB < most <= 2 * MB
    refused = running.metric("sidecar_requests_total", status="503")
    reasons = ("announced", "coming", "whole")
    by_reason = [running.metric("sidecar_bodies_refused_total", reason=one) for one in reasons]
    assert 0 < refused < len(clients)
    assert sum(by_reason) == refused
    answered = [c for c in clients if c.relays._closing]
    for client in answered:
        reply = await client.hear()
        assert (reply.status, reply.header(b"retry-after")) == (503, b"1")
        assert reply.header(b"connection") == b"close"
        assert b"proxy.max_body_bytes" in reply.body
    for client in clients:
        client.hang_up()
    await until(lambda: not running.proxy._relay._connections)
    assert running.metric("sidecar_request_body_bytes") == 0


@pytest.mark.parametrize("fields", [(), (b"Expect: 100-continue",)])
async def test_where_the_memory_is_used_up_a_long_body_is_refused_at_its_head(
    fields: tuple[bytes, ...], start_proxy: StartProxy, bring: Bring
) -> None:
    """And an ordinary request is served as ever."""
    running = await start_proxy(
        proxy={"max_body_bytes": MB, "held_bodies": 1, "body_timeout_s": LONG_S},
        capture={"sample_rate": 0.0},
    )
    first = await bring(running)
    first.say(announced(MB) + bytes(900_000))
    await until(lambda: first.relays._parser.body_bytes == 900_000)

    late = await bring(running)
    late.say(announced(MB, *fields))
    reply = await late.hear()
    ordinary = await bring(running)
    for _ in range(3):
        body = question(FREE_BYTES)
        ordinary.say(announced(len(body)) + body)
        assert (await ordinary.hear()).status == 200

    assert (reply.status, reply.header(b"retry-after"), reply.interim) == (503, b"1", ())
    assert late.relays._parser.body_bytes == 0
    assert running.metric("sidecar_bodies_refused_total", reason="announced") == 1
    first.hang_up()
    await until(lambda: first.relays not in running.proxy._relay._connections)
    again = await bring(running)
    body = question(900_000)
    again.say(announced(len(body)) + body)
    assert (await again.hear()).status == 200


async def test_bodies_in_flight_are_counted_until_their_reply_is_out(
    start_proxy: StartProxy, bring: Bring, fake_vllm: StrictVllm, wire: Wire
) -> None:
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [go_on, wire.whole_reply(b"{}")]
    running = await start_proxy(
        proxy={"max_body_bytes": MB, "held_bodies": 1}, capture={"sample_rate": 0.0}
    )
    body = question(400_000)
    clients = [await bring(running) for _ in range(2)]
    for number, client in enumerate(clients, 1):
        client.say(announced(len(body)) + body)
        await until(partial(has_come, fake_vllm, number))
    assert running.metric("sidecar_request_body_bytes") == 800_000

    third = await bring(running)
    third.say(announced(len(body)) + body)
    assert (await third.hear()).status == 503
    go_on.set()
    assert [(await client.hear()).status for client in clients] == [200, 200]

    assert running.metric("sidecar_request_body_bytes") == 0
    clients[0].say(announced(len(body)) + body)
    assert (await clients[0].hear()).status == 200


async def test_a_body_that_is_alone_is_taken_whatever_the_budget(
    start_proxy: StartProxy, bring: Bring
) -> None:
    running = await start_proxy(proxy={"held_bodies": 0}, capture={"sample_rate": 0.0})
    client = await bring(running)
    for size in (300_000, 3_000_000):
        body = question(size)
        client.say(announced(len(body)) + body)
        assert (await client.hear()).status == 200
    chunk = question(200_000)
    client.say(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk))
    assert (await client.hear()).status == 200
    assert running.metric("sidecar_request_body_bytes") == 0


@pytest.mark.parametrize("first_bytes", [announced(MB), CHUNKED + b"100000\r\n"])
async def test_a_body_that_was_refused_is_not_held_while_its_client_stays(
    first_bytes: bytes, start_proxy: StartProxy, bring: Bring
) -> None:
    running = await start_proxy(proxy={"body_timeout_s": 0.3, "write_timeout_s": LONG_S})
    client = await bring(running)
    client.say(first_bytes + bytes(600_000))

    assert (await client.hear()).status == 408

    relays = client.relays
    assert relays._parser._body.take() == b""
    assert relays._early.size == 0
    assert running.metric("sidecar_request_body_bytes") == 0


# -- a key's requests


class KeyMaker:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, requests_per_minute: int | None = None) -> str:
        return api_keys.create(self._database, requests_per_minute=requests_per_minute)[1]

    def revoke(self, presented: str) -> None:
        api_keys.revoke(self._database, presented.split("-")[2])


@pytest.fixture
def make_key(state_dir: Path) -> Iterator[KeyMaker]:
    database = open_migrated(state_dir / "store.db")
    yield KeyMaker(database)
    database.close()


async def refused(client: Dial) -> tuple[int, str]:
    reply = await client.hear()
    return reply.status, json.loads(reply.body)["error"]["code"]


@pytest.mark.parametrize("came", [0, 10, FREE_BYTES + 1])
async def test_a_request_counts_against_its_key_when_its_head_is_here(
    came: int, start_proxy: StartProxy, bring: Bring, make_key: KeyMaker, fake_vllm: StrictVllm
) -> None:
    """Who keeps bodies unfinished uses up the key's requests as everybody else does."""
    key = make_key.create(requests_per_minute=2)
    shown = b"Authorization: Bearer " + key.encode()
    running = await start_proxy(
        clock=lambda: 1_000_000.0, access={"mode": "keys"}, proxy={"body_timeout_s": LONG_S}
    )
    for _ in range(2):
        slow = await bring(running)
        slow.say(announced(MB, shown) + bytes(came))
        await until_admitted(slow)

    late = await bring(running)
    body = question(200)
    late.say(announced(len(body), shown) + body)

    assert await refused(late) == (429, "rate_limit_exceeded")
    assert fake_vllm.requests == []
    assert running.metric("sidecar_access_denied_total", reason="requests_per_minute") == 1


async def test_who_is_over_the_limit_is_told_before_the_long_body_and_after_a_short_one(
    start_proxy: StartProxy, bring: Bring, make_key: KeyMaker
) -> None:
    key = make_key.create(requests_per_minute=1)
    shown = b"Authorization: Bearer " + key.encode()
    running = await start_proxy(
        clock=lambda: 1_000_000.0, access={"mode": "keys"}, proxy={"body_timeout_s": LONG_S}
    )
    body = question(200)
    client = await bring(running)
    client.say(announced(len(body), shown) + body)
    assert (await client.hear()).status == 200

    await client.say_apart(announced(len(body), shown), body)
    assert await refused(client) == (429, "rate_limit_exceeded")
    client.say(announced(MB, shown) + bytes(FREE_BYTES + 1))
    assert await refused(client) == (429, "rate_limit_exceeded")

    assert await client.closed()
    assert running.metric("sidecar_access_denied_total", reason="requests_per_minute") == 2


async def test_a_key_that_is_revoked_while_its_body_is_coming_is_refused(
    start_proxy: StartProxy, bring: Bring, make_key: KeyMaker, fake_vllm: StrictVllm
) -> None:
    key = make_key.create()
    running = await start_proxy(access={"mode": "keys"}, proxy={"body_timeout_s": LONG_S})
    body, client = question(300), await bring(running)
    client.say(announced(len(body), b"Authorization: Bearer " + key.encode()) + body[:100])
    await until_admitted(client)
    make_key.revoke(key)
    await until(lambda: running.metric("sidecar_api_keys") == 0)

    client.say(body[100:])

    assert (await refused(client))[0] == 401
    assert fake_vllm.requests == []
    assert running.metric("sidecar_access_denied_total", reason="revoked") == 1


# -- the floor


@pytest.fixture
async def watch(start_proxy: StartProxy, fake_vllm: StrictVllm) -> BodyWatch:
    """Its body may stand still for 30 s."""
    running = await start_proxy(proxy={"body_timeout_s": 30.0})
    return BodyWatch(running.proxy._relay._context)


def test_the_floor_is_a_kilobyte_a_second() -> None:
    assert MIN_BODY_BYTES_PER_S == 1024


async def test_a_body_that_came_fast_at_first_may_not_drip_afterwards(watch: BodyWatch) -> None:
    """Nine megabytes at once and a byte every 29 s once held them for two and a half hours."""
    watch.moved(9 * MB, at=1000.0)

    watch.moved(9 * MB + 1, at=1029.0)

    assert not watch.is_late(1030.0)
    assert watch.is_late(1030.1)


async def test_a_body_that_comes_steadily_at_the_floor_is_never_late(watch: BodyWatch) -> None:
    watch.moved(1, at=1000.0)
    for second in range(1, 20_000):
        assert not watch.is_late(1000.0 + second)
        watch.moved(1 + second * MIN_BODY_BYTES_PER_S, at=1000.0 + second)


async def test_a_body_under_the_floor_is_late_when_what_it_may_owe_is_used_up(
    watch: BodyWatch,
) -> None:
    """At half the floor: 30 s of credit last a minute."""
    watch.moved(1, at=1000.0)
    late = 0
    for second in range(1, 120):
        if watch.is_late(1000.0 + second):
            late = second
            break
        watch.moved(1 + second * 512, at=1000.0 + second)
    assert 58 <= late <= 61


async def test_a_large_body_that_begins_to_drip_is_ended(
    start_proxy: StartProxy, bring: Bring
) -> None:
    running = await start_proxy(
        proxy={"body_timeout_s": 0.5, "idle_timeout_s": LONG_S, "write_timeout_s": LONG_S}
    )
    client = await bring(running)
    client.say(announced(9 * MB) + bytes(8 * MB))

    async def drip() -> None:
        while not client.writer.is_closing():
            client.say(b"x")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    reply = await client.hear(within_s=60.0)

    dripping.cancel()
    assert (reply.status, reply.header(b"connection")) == (408, b"close")
    assert running.metric("sidecar_clients_cut_total", reason="too_slow") == 1
    assert running.metric("sidecar_request_body_bytes") == 0
