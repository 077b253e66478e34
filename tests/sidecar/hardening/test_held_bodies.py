"""What the bodies of requests hold of a worker: memory, a place, and a key's requests."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sidecar.relay.client import BodyWatch, ClientConnection
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
    """A client on a connection of its own."""

    relays: ClientConnection
    """The relay's end of it."""


Bring = Callable[[Running], Awaitable[Brought]]


async def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.001)


async def until_admitted(client: Brought) -> None:
    await until(lambda: client.relays._watch._admitted is not None)


@pytest.fixture
def bring(start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm) -> Bring:
    async def connect(running: Running) -> Brought:
        known = set(running.proxy._relay._connections)
        client = await dial(running)
        await until(lambda: len(running.proxy._relay._connections) > len(known))
        brought = Brought(client.reader, client.writer)
        [brought.relays] = running.proxy._relay._connections - known
        return brought

    return connect


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


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (announced(MB), "announced"),
        (announced(MB, b"Expect: 100-continue"), "announced"),
        (CHUNKED + b"100000\r\n" + bytes(300_000), "coming"),
    ],
    ids=["announced", "expect", "chunked"],
)
async def test_where_the_memory_is_used_up_a_long_body_is_refused(
    sent: bytes, reason: str, start_proxy: StartProxy, bring: Bring
) -> None:
    """At its head if that says its length. And an ordinary request is served as ever."""
    running = await start_proxy(
        proxy={"max_body_bytes": MB, "held_bodies": 1, "body_timeout_s": LONG_S},
        capture={"sample_rate": 0.0},
    )
    first = await bring(running)
    first.say(announced(MB) + bytes(900_000))
    await until(lambda: first.relays._parser.body_bytes == 900_000)

    late = await bring(running)
    late.say(sent)
    reply = await late.hear()
    assert reply.header(b"connection") == b"close"
    assert b"proxy.max_body_bytes" in reply.body
    ordinary = await bring(running)
    for _ in range(3):
        body = question(FREE_BYTES)
        ordinary.say(announced(len(body)) + body)
        assert (await ordinary.hear()).status == 200

    assert (reply.status, reply.header(b"retry-after"), reply.interim) == (503, b"1", ())
    assert running.metric("sidecar_bodies_refused_total", reason=reason) == 1
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
        await until(lambda: len(fake_vllm.requests) == number)  # noqa: B023
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


@pytest.fixture
def database(state_dir: Path) -> Iterator[Database]:
    database = open_migrated(state_dir / "store.db")
    yield database
    database.close()


def key_of(database: Database, requests_per_minute: int | None = None) -> str:
    return api_keys.create(database, requests_per_minute=requests_per_minute)[1]


async def refused(client: Dial) -> tuple[int, str]:
    reply = await client.hear()
    return reply.status, json.loads(reply.body)["error"]["code"]


@pytest.mark.parametrize("came", [0, 10, FREE_BYTES + 1])
async def test_a_request_counts_against_its_key_when_its_head_is_here(
    came: int, start_proxy: StartProxy, bring: Bring, database: Database, fake_vllm: StrictVllm
) -> None:
    """Who keeps bodies unfinished uses up the key's requests as everybody else does."""
    key = key_of(database, requests_per_minute=2)
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
    start_proxy: StartProxy, bring: Bring, database: Database
) -> None:
    key = key_of(database, requests_per_minute=1)
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
    start_proxy: StartProxy, bring: Bring, database: Database, fake_vllm: StrictVllm
) -> None:
    key = key_of(database)
    running = await start_proxy(access={"mode": "keys"}, proxy={"body_timeout_s": LONG_S})
    body, client = question(300), await bring(running)
    client.say(announced(len(body), b"Authorization: Bearer " + key.encode()) + body[:100])
    await until_admitted(client)
    api_keys.revoke(database, key.split("-")[2])
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


async def test_a_body_that_came_fast_at_first_may_not_drip_afterwards(watch: BodyWatch) -> None:
    """Nine megabytes at once and a byte every 29 s once held them for two and a half hours."""
    watch.moved(9 * MB, at=1000.0)

    watch.moved(9 * MB + 1, at=1029.0)

    assert not watch.is_late(1030.0)
    assert watch.is_late(1030.1)


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
