"""Where the network cuts the bytes must not matter, in either direction. Every cut is a read of its
own for the relay: the kernel is asked whether the piece before was taken (see `say_apart` and
`piecewise`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from support.fake_vllm import Step
from support.proxy_kit import StartProxy
from support.strict_peers import Connect, Dial, Headers, StrictVllm

Recorded = Callable[[str], bytes]
CHAT = b"/v1/chat/completions"
TEXT = '{"model":"smollm2-135m","messages":[{"role":"user","content":"Zürich 😀 \\"q\\""}],"x":1e5}'
BODY = TEXT.encode()


def post(body: bytes, *fields: bytes) -> bytes:
    lines = (b"POST %b?q=1 HTTP/1.1" % CHAT, b"Host: x", b"X-Name: a, b", *fields)
    return b"\r\n".join((*lines, b"Content-Length: %d" % len(body), b"", body))


def chunked(body: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n" % CHAT
    pieces = b"3;e=1\r\n%b\r\n%X\r\n%b\r\n" % (body[:3], len(body) - 3, body[3:])
    return head + pieces + b"0\r\nT: 1\r\n\r\n"


SHAPES = {
    "length": post(BODY),
    "chunked": chunked(BODY),
    "expect": post(BODY, b"Expect: 100-continue"),
    "refused": post(b'{"model": nope}'),
    "no such path": post(BODY).replace(CHAT, b"/v1/chat"),
    "pipelined": post(BODY) + post(b'{"model":"other"}') + chunked(BODY),
}


def what_vllm_saw(fake_vllm: StrictVllm) -> list[tuple[bytes, bytes, Headers, bytes]]:
    seen = [(one.method, one.target, one.headers, one.body) for one in fake_vllm.requests]
    fake_vllm.requests.clear()
    return seen


async def hear_all(client: Dial, count: int) -> list[tuple[int, Headers, bytes]]:
    replies = [await client.hear() for _ in range(count)]
    own = (b"x-sidecar-exchange-id",)
    return [
        (one.status, tuple(pair for pair in one.headers if pair[0] not in own), one.body)
        for one in replies
    ]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_request_cut_anywhere_is_the_same_request(
    shape: str, start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    sent = SHAPES[shape]
    count = sent.count(b"POST ")
    fake_vllm.script = lambda seen: [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(seen.body) + seen.body
    ]
    running = await start_proxy()
    client = await dial(running)
    client.say(sent)
    whole = await hear_all(client, count), what_vllm_saw(fake_vllm)

    for cut in range(1, len(sent)):
        await client.say_apart(sent[:cut], sent[cut:])
        assert (await hear_all(client, count), what_vllm_saw(fake_vllm)) == whole, cut
    await client.say_apart(*(sent[at : at + 1] for at in range(len(sent))))
    assert (await hear_all(client, count), what_vllm_saw(fake_vllm)) == whole


async def test_an_event_goes_on_when_its_last_byte_comes(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """Whatever the chunks are: no event waits for the one behind it."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[1]}]}\n\n'
    stripped = event.replace(b"[1]", b"null")
    gates = [asyncio.Event() for _ in range(5)]
    pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in (event[:30], event[30:])]
    steps: list[Step] = [head]
    for gate in gates:
        steps += [*pieces, gate]
    fake_vllm.play(*steps, "close")
    client = await dial(await start_proxy())
    client.say(post(BODY))
    await client.reader.readuntil(b"\r\n\r\n")

    for gate in gates:
        async with asyncio.timeout(60):
            assert await client.reader.readuntil(b"\n\n\r\n") == (
                b"%x\r\n%b\r\n" % (len(stripped), stripped)
            )
        gate.set()
