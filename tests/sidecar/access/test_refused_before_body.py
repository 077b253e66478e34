"""A client that will be refused is refused before its long body is held; others see no change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

import pytest

from sidecar.relay.client import MAX_UNAUTHENTICATED_BYTES, ClientConnection
from support.fake_vllm import FakeVllm
from support.proxy_kit import Running, StartProxy, Wire
from tests.sidecar.access.conftest import KeyStore

PIECE = bytes(16 * 1024)
ANNOUNCED = 10 * 2**20
SENT = 2**20
NOW = 1_000_000.0
CHAT = "/v1/chat/completions"
UNKNOWN = "sk-sidecar-0123456789ab-x"


@dataclass
class Site:
    """A vLLM that answers as it was recorded, the keys, and proxies that ask for them."""

    keys: KeyStore
    vllm: FakeVllm
    wire: Wire
    start_proxy: StartProxy

    async def start(self, clock: Callable[[], float] = lambda: NOW) -> Running:
        self.vllm.play(self.wire.recording("chat.plain").reply)
        return await self.start_proxy(
            clock=clock, access={"mode": "keys"}, capture={"sample_rate": 0.0}
        )


@pytest.fixture
def site(keys: KeyStore, fake_vllm: FakeVllm, wire: Wire, start_proxy: StartProxy) -> Site:
    return Site(keys, fake_vllm, wire, start_proxy)


@dataclass
class Client:
    """One connection, and the proxy's end of it."""

    running: Running
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: ClientConnection

    @property
    def held(self) -> int:
        return int(self.connection._parser.body_bytes)

    @property
    def refused(self) -> bool:
        return bool(self.connection._closing)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_slowly(self, size: int, *, chunked: bool = False) -> int:
        """Send a body piece by piece, each when the one before has arrived, until it is refused.

        Returns: how much was sent."""
        sent = 0
        while sent < size and not self.refused:
            framed = b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if chunked else PIECE
            await self.say(framed)
            sent += len(PIECE)
            while self.held < sent and not self.refused:
                await asyncio.sleep(0.001)
        return sent

    async def hear(self) -> tuple[str, dict[str, str], bytes]:
        """One whole reply."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        line, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (i.partition(": ") for i in lines)}
        return line, headers, await self.reader.readexactly(int(headers["content-length"]))

    async def gone(self) -> None:
        """The proxy has let go of it."""
        async with asyncio.timeout(60):
            while self.running.proxy._relay._connections:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def dialled(running: Running) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        async with asyncio.timeout(60):
            while not running.proxy._relay._connections:
                await asyncio.sleep(0.001)
            [connection] = running.proxy._relay._connections
            yield Client(running, reader, writer, connection)
    finally:
        writer.transport.abort()


def head(
    length: int | None, key: str = "", *, path: str = CHAT, more: str = "", header: str = ""
) -> bytes:
    """length: None for a chunked body. header: how the key is shown."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    shown = (header or "Authorization: Bearer {}").format(key) + "\r\n" if key else ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{framing}\r\n{shown}{more}\r\n".encode()


def large_body(wire: Wire, size: int = 300_000) -> bytes:
    """A request that vLLM would take."""
    asked = json.loads(wire.recording("chat.plain").request)
    asked["messages"] = [{"role": "user", "content": "x" * size}]
    return json.dumps(asked).encode()


UNAUTHENTICATED = ["no_key", "unknown", "expired", "revoked", "two_keys", "scope_operate"]


def unauthenticated_head(kind: str, keys: KeyStore) -> bytes:
    """A request head that is refused for this reason."""
    if kind == "no_key":
        return head(ANNOUNCED)
    if kind == "unknown":
        return head(ANNOUNCED, UNKNOWN)
    if kind == "expired":
        return head(ANNOUNCED, keys.create(expires_at=NOW)[1])
    key_id, key = keys.create()
    if kind == "revoked":
        keys.revoke(key_id)
        return head(ANNOUNCED, key)
    named = {"two_keys": "x-api-key: another", "scope_operate": "x-sidecar-adapter: canary"}
    return head(ANNOUNCED, key, more=f"{named[kind]}\r\n")


@pytest.mark.parametrize("kind", UNAUTHENTICATED)
async def test_an_unauthenticated_client_is_refused_while_its_body_is_still_coming(
    kind: str, site: Site
) -> None:
    request_head = unauthenticated_head(kind, site.keys)
    running = await site.start()
    async with dialled(running) as client:
        await client.say(request_head)
        sent = await client.send_slowly(SENT)
        # The first piece that goes beyond 64 kB is the fifth of 16.
        assert sent == 5 * len(PIECE)
        held = client.held
        assert MAX_UNAUTHENTICATED_BYTES < held <= 128 * 1024
        for _ in range((SENT - sent) // len(PIECE)):
            await client.say(PIECE)

        line, headers, body = await client.hear()

        status = "403 Forbidden" if kind == "scope_operate" else "401 Unauthorized"
        assert (line, headers["connection"]) == (f"HTTP/1.1 {status}", "close")
        assert json.loads(body)["error"]["code"].startswith(("invalid_api_key", "insufficient"))
        assert await client.reader.read() == b""
        assert client.held == held
        await client.gone()
    assert site.vllm.requests == []
    assert running.metric("sidecar_access_denied_total", reason=kind) == 1
    assert running.metric("sidecar_requests_total", status=status[:3]) == 1


async def test_a_stranger_who_sends_in_chunks_is_refused_as_early(site: Site) -> None:
    site.keys.create()
    running = await site.start()
    async with dialled(running) as client:
        await client.say(head(None))
        assert await client.send_slowly(SENT, chunked=True) == 5 * len(PIECE)
        line, headers, _ = await client.hear()

    assert (line, headers["connection"]) == ("HTTP/1.1 401 Unauthorized", "close")
    assert site.vllm.requests == []


async def test_a_head_that_was_good_before_is_looked_at_again(site: Site) -> None:
    """Heads that come again are recognised, and what they showed is remembered with them."""
    _, key = site.keys.create(expires_at=NOW)
    now = NOW - 1
    running = await site.start(clock=lambda: now)
    body = large_body(site.wire)
    async with dialled(running) as client:
        for _ in range(3):
            await client.say(head(len(body), key))
            await client.say(body)
            assert (await client.hear())[0] == "HTTP/1.1 200 OK"
        now = NOW

        await client.say(head(len(body), key))
        sent = await client.send_slowly(len(body))

        assert sent == 5 * len(PIECE)
        line, headers, _ = await client.hear()
    assert (line, headers["connection"]) == ("HTTP/1.1 401 Unauthorized", "close")
    assert len(site.vllm.requests) == 3


@pytest.mark.parametrize("key", ["", UNKNOWN])
async def test_a_stranger_who_waits_for_100_is_never_told_to_go_on(key: str, site: Site) -> None:
    site.keys.create()
    running = await site.start()
    async with dialled(running) as client:
        await client.say(head(10, key, more="Expect: 100-continue\r\n"))

        line, headers, _ = await client.hear()

        assert (line, headers["connection"]) == ("HTTP/1.1 401 Unauthorized", "close")
        assert await client.reader.read() == b""
        assert client.held == 0
    assert site.vllm.requests == []


async def test_a_good_key_that_waits_for_100_is_told_once_and_counted_once(site: Site) -> None:
    _, key = site.keys.create(requests_per_minute=3)
    running = await site.start()
    body = large_body(site.wire)
    async with dialled(running) as client:
        for left in ("2", "1"):
            await client.say(head(len(body), key, more="Expect: 100-continue\r\n"))
            told = await client.reader.readuntil(b"\r\n\r\n")
            assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
            for start in range(0, len(body), len(PIECE)):
                await client.say(body[start : start + len(PIECE)])

            line, headers, _ = await client.hear()

            assert (line, headers["x-ratelimit-remaining-requests"]) == ("HTTP/1.1 200 OK", left)
    sent = [json.loads(seen.body)["messages"][0]["content"] for seen in site.vllm.requests]
    assert list(map(len, sent)) == [300_000] * 2


@pytest.mark.parametrize("expects", [False, True])
async def test_where_nothing_is_no_large_body_is_taken(expects: bool, site: Site) -> None:
    _, key = site.keys.create()
    running = await site.start()
    more = "Expect: 100-continue\r\n" if expects else ""
    async with dialled(running) as client:
        await client.say(head(ANNOUNCED, key, path="/v1/nowhere", more=more))
        sent = 0 if expects else await client.send_slowly(SENT)
        line, headers, body = await client.hear()

        assert sent == (0 if expects else 5 * len(PIECE))
        assert (line, headers["connection"]) == ("HTTP/1.1 404 Not Found", "close")
        assert json.loads(body)["error"]["message"] == "Not Found"
        assert await client.reader.read() == b""
    assert site.vllm.requests == []
    assert running.metric("sidecar_requests_total", status="404") == 1


@pytest.mark.parametrize("size", [2, MAX_UNAUTHENTICATED_BYTES])
async def test_a_small_body_of_a_stranger_is_read_and_the_connection_stays(
    size: int, site: Site
) -> None:
    _, key = site.keys.create()
    running = await site.start()
    request = site.wire.recording("chat.plain").request
    async with dialled(running) as client:
        for path, status in ((CHAT, "401 Unauthorized"), ("/v1/nowhere", "404 Not Found")):
            await client.say(head(size, UNKNOWN, path=path))
            await client.say(b"x" * size)
            line, headers, _ = await client.hear()
            assert line == f"HTTP/1.1 {status}"
            assert "connection" not in headers

        await client.say(head(len(request), key) + request)
        line, _, _ = await client.hear()

    assert line == "HTTP/1.1 200 OK"
    assert len(site.vllm.requests) == 1
    assert running.metric("sidecar_access_denied_total", reason="unknown") == 1


async def test_a_good_request_before_a_strangers_is_answered_first(site: Site) -> None:
    _, key = site.keys.create()
    running = await site.start()
    item, may_answer = site.wire.recording("chat.plain"), asyncio.Event()
    site.vllm.script = lambda _: [may_answer, item.reply]
    async with dialled(running) as client:
        await client.say(head(len(item.request), key) + item.request + head(ANNOUNCED))
        for _ in range(8):
            await client.say(PIECE)
        while not site.vllm.requests or client.connection._early.size == 0:
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.readexactly(1), 0.1)
        may_answer.set()

        first, second = await client.hear(), await client.hear()

        assert (first[0], first[2]) == ("HTTP/1.1 200 OK", item.body)
        assert (second[0], second[1]["connection"]) == ("HTTP/1.1 401 Unauthorized", "close")
        assert await client.reader.read() == b""
    assert len(site.vllm.requests) == 1


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_what_asks_for_no_key_takes_no_long_body(
    path: str, start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    running = await start_proxy()
    async with dialled(running) as client:
        await client.say(head(ANNOUNCED, path=path))
        sent = await client.send_slowly(SENT)

        line, headers, body = await client.hear()

        phrase = HTTPStatus(413).phrase  # other words from Python 3.13 on
        assert sent == 5 * len(PIECE)
        assert (line, headers["connection"]) == (f"HTTP/1.1 413 {phrase}", "close")
        assert "takes no body" in json.loads(body)["error"]["message"]


async def test_a_short_body_is_nothing_to_a_path_of_ours(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    running = await start_proxy()
    async with dialled(running) as client:
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")

        line, _, _ = await client.hear()

        assert line == "HTTP/1.1 200 OK"
