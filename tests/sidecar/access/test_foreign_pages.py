"""A page of another site has a browser of this machine ask a proxy in mode open."""

from __future__ import annotations

import json

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

BODY = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}]}'
FEEDBACK = b'{"exchange_id":"ex_01M8EKFEQQZX3TWMSKM7YP0YF3","score":1}'


def from_page(path: str, origin: str, *, body: bytes = BODY, method: str = "POST") -> bytes:
    """What a form of the page sends: no preflight comes before it."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nOrigin: {origin}\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", BODY),
        ("/v1/completions", BODY),
        ("/v1/responses", BODY),
        ("/v1/messages", BODY),
        ("/v1/embeddings", BODY),
        ("/tokenize", BODY),
        ("/sidecar/v1/feedback", FEEDBACK),
        ("/sidecar/v1/outcomes", FEEDBACK),
    ],
)
async def test_it_reaches_neither_vllm_nor_the_records(
    path: str, body: bytes, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, reply = wire.split(
        await running.send(from_page(path, "http://evil.example", body=body))
    )

    assert line == "HTTP/1.1 403 Forbidden"
    assert "A web page of another site" in json.dumps(json.loads(reply))
    assert (fake_vllm.requests, running.sink.exchanges) == ([], [])
    assert running.metric("sidecar_access_denied_total", reason="foreign_origin") == 1
    assert running.metric("sidecar_exchanges_total", outcome="ok") == 0
