"""One connection takes no more than a small share of a turn of the event loop, whatever it sends.
Counted in requests and in calls of the parser between two turns, never in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pytest

from sidecar.proxy import relay_is_compiled
from sidecar.relay.client import REQUESTS_AT_ONCE
from sidecar.relay.context import Accounts
from sidecar.relay.request_parser import RequestParser
from support.proxy_kit import StartProxy, Wire
from support.strict_peers import Connect, Dial, StrictVllm, post

pytestmark = pytest.mark.skipif(
    relay_is_compiled(),
    reason="it counts calls by patched methods, which compiled code does not look up: "
    "tests/sidecar/test_compiled.py runs this file on the sources",
)

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Turns:
    """How much was done in one turn of the loop at most. count: all that was done so far."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.most = 0
        self._count = count
        self._before = count()
        self._loop = asyncio.get_running_loop()
        self._ended = False

    def __enter__(self) -> Self:
        self._turn()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended = True

    def _turn(self) -> None:
        now = self._count()
        self.most = max(self.most, now - self._before)
        self._before = now
        if not self._ended:
            self._loop.call_soon(self._turn)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The status of every request that was answered."""
    statuses: list[int] = []
    count = Accounts.request

    def counting(self: Accounts, status: int) -> None:
        statuses.append(status)
        count(self, status)

    monkeypatch.setattr(Accounts, "request", counting)
    return statuses


async def eat(client: Dial) -> None:
    """Read and forget, so that the client is one who reads its replies."""
    while await client.reader.read(2**20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("request_", "status"), [(GET, 404), (post(b"not json"), 400)], ids=["path", "body"]
)
async def test_few_of_the_refusals_that_a_client_pipelines_are_answered_in_one_turn(
    request_: bytes,
    status: int,
    start_proxy: StartProxy,
    dial: Connect,
    fake_vllm: StrictVllm,
    answered: list[int],
) -> None:
    client, sent = await dial(await start_proxy()), 3000
    eating = asyncio.create_task(eat(client))

    with Turns(lambda: len(answered)) as turns:
        client.say(request_ * sent)
        async with asyncio.timeout(60):
            while len(answered) < sent:
                await asyncio.sleep(0.001)

    eating.cancel()
    assert set(answered[1:]) == {status}
    # A turn that ends what was left may read and begin some more.
    assert 0 < turns.most <= 2 * REQUESTS_AT_ONCE


@pytest.mark.parametrize(
    ("callback", "sent"),
    [
        ("on_message_begin", GET * 20_000),
        (
            "on_body",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"1\r\nx\r\n" * 100_000,
        ),
        ("on_header", b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 15_000),
    ],
)
async def test_what_is_parsed_in_one_turn_is_bounded(
    callback: str,
    sent: bytes,
    start_proxy: StartProxy,
    dial: Connect,
    fake_vllm: StrictVllm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    inner = getattr(RequestParser, callback)

    def counting(self: RequestParser, *given: bytes) -> None:
        nonlocal calls
        calls += 1
        inner(self, *given)

    monkeypatch.setattr(RequestParser, callback, counting)
    running = await start_proxy()
    client = await dial(running)
    eating = asyncio.create_task(eat(client))
    expected = 10_000

    with Turns(lambda: calls) as turns:
        client.say(sent)
        async with asyncio.timeout(60):
            while calls < expected:
                await asyncio.sleep(0.001)

    eating.cancel()
    assert 0 < turns.most <= 1100  # a slice of 4096 bytes, with the shortest of header lines


async def test_who_reads_no_refusals_gets_no_more_of_them_than_a_buffer_holds(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm, answered: list[int]
) -> None:
    running = await start_proxy(proxy={"write_timeout_s": 30.0})
    client = await dial(running, limit=1024)
    async with asyncio.timeout(60):
        while not running.proxy._relay._connections:
            await asyncio.sleep(0.001)
    [connection] = running.proxy._relay._connections
    client.pause_reading()
    client.say(GET * 200_000)
    unsent: list[int] = []
    waiting: list[int] = []
    async with asyncio.timeout(60):
        while not connection._writing_paused or len(unsent) < 50:
            await asyncio.sleep(0.001)
            assert connection._transport is not None
            unsent.append(connection._transport.get_write_buffer_size())
            waiting.append(len(connection._parser.ready) + connection._early.size // len(GET))

    stopped_at = len(answered)
    other = await dial(running)
    other.say(HEALTH)
    assert (await other.hear(b"GET")).status == 200

    assert len(answered) == stopped_at + 1
    assert max(unsent) < 100_000
    assert max(waiting) * len(GET) < 1_000_000  # one read of the loop, and what may wait


async def test_pipelined_refusals_that_wait_for_their_turn_are_answered_before_the_end(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """The last of them asks for the close."""
    client = await dial(await start_proxy())
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    client.say(GET * 999 + last)

    replies = [await client.hear(b"GET") for _ in range(1000)]
    assert {reply.status for reply in replies} == {404}
    assert json.loads(replies[-1].body)["error"]["message"] == "Not Found"
    assert await client.closed()


async def test_small_pieces_that_come_early_are_kept_in_few_objects(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm, wire: Wire
) -> None:
    """A client may send a byte at a time while another request of it is in flight."""
    go_on = asyncio.Event()
    fake_vllm.script = lambda _: [go_on, wire.whole_reply(b"{}")]
    running = await start_proxy(capture={"sample_rate": 0.0})
    client = await dial(running)
    client.say(post())
    await fake_vllm.asked()
    [connection] = running.proxy._relay._connections
    rest = post(b'{"model":"smollm2-135m","messages":[],"x":"' + b"y" * 9000 + b'"}')
    for start in range(0, len(rest), 3):
        connection.data_received(rest[start : start + 3])

    assert connection._early.size == len(rest)
    assert len(connection._early.pieces) <= 4
    go_on.set()
    assert [(await client.hear()).status for _ in range(2)] == [200, 200]
    assert len(fake_vllm.requests[1].body) == len(rest.partition(b"\r\n\r\n")[2])
