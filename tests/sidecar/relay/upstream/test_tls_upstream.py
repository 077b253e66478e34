"""A vLLM behind TLS: whatever way a request is written, it goes out encrypted, and replies come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

TLS = Path(__file__).parents[2] / "tls"
CERTIFICATE, KEY = TLS / "loopback_cert.pem", TLS / "loopback_key.pem"
"""Made for these tests, for `localhost` only, by `openssl req -x509 -newkey ec -pkeyopt
ec_paramgen_curve:P-256 -nodes -days 36500 -subj /CN=localhost -addext
subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout loopback_key.pem -out loopback_cert.pem`."""


@pytest.fixture
async def tls_port(fake_vllm: FakeVllm) -> AsyncIterator[int]:
    """What comes here encrypted goes on to the fake vLLM."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE, KEY)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):  # one side is gone: the other ends too
                while data := await reader.read(65_536):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, out = await asyncio.open_connection("127.0.0.1", fake_vllm.port)
        await asyncio.gather(carry(reader, out), carry(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize(
    "size", [100, 20_000, 300_000], ids=["at once", "head and body", "in pieces"]
)
async def test_requests_and_streams_pass(
    size: int,
    tls_port: int,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    events = [b'data: {"n":%d}\n\n' % number for number in range(20)]
    stream = [wire.STREAM_HEAD, *map(wire.chunk, events), wire.LAST_CHUNK]
    fake_vllm.script = lambda _: stream
    running = await start_proxy(serving={"upstreams": (f"https://localhost:{tls_port}",)})
    body = {
        "messages": [{"role": "user", "content": "x" * size}],
        "model": "smollm2-135m",
        "stream": True,
    }

    for _ in range(3):  # on a new connection, and on one that is kept
        received = await running.send(wire.post(json.dumps(body).encode(), close=True))

        line, _, reply = wire.split(received)
        assert line == "HTTP/1.1 200 OK"
        assert reply == b"".join(events)

    assert len(fake_vllm.requests) == 3
    for seen in fake_vllm.requests:
        assert json.loads(seen.body)["messages"] == body["messages"]
    assert fake_vllm.connections <= 2  # one more is the watch's


async def test_a_certificate_that_nobody_vouches_for_is_refused(
    tls_port: int, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy(serving={"upstreams": (f"https://localhost:{tls_port}",)})

    received = await running.send(wire.post(b'{"model":"smollm2-135m","messages":[]}', close=True))

    line, _, reply = wire.split(received)
    assert line == "HTTP/1.1 502 Bad Gateway"
    assert b"error" in reply
    assert fake_vllm.requests == []
