"""A stream that loses vLLM ends as vLLM's own failure does on that surface, where that can be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

SURFACES = ["chat", "completions", "responses", "messages"]
CAPTURE = {"on": {}, "off": {"sample_rate": 0.0}}
KINDS = [*((one, "on") for one in SURFACES), ("chat", "off")]


def read_chunks(framed: bytes) -> tuple[bytes, bool]:
    """The body of a chunked reply that may be cut, and whether it has a proper end."""
    body = b""
    while framed:
        size, _, rest = framed.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body, rest == b"\r\n"
        body += rest[:length]
        framed = rest[length + 2 :]
    return body, False


def last_events(body: bytes, count: int) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return body[:-2].split(b"\n\n")[-count:]


def streams(surface: str, capture: str, wire: Wire) -> tuple[Any, Any]:
    """What the client asks, and what vLLM then sends."""
    plain = wire.recording(f"{surface}_stream.plain")
    both = surface in ("chat", "completions") and capture == "on"
    return plain, wire.recording(f"{surface}_stream.asked") if both else plain


@pytest.mark.parametrize(
    ("surface", "capture", "end"),
    [
        *((one, "on", "reset") for one in SURFACES),
        ("chat", "off", "close"),
        ("chat", "on", "close"),
    ],
)
async def test_a_stream_lost_between_two_events_ends_as_vllms_own_failure_does(
    surface: str, capture: str, end: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    plain, sent = streams(surface, capture, wire)
    fake_vllm.script = lambda _: [sent.head, *sent.chunks[:4], 0.02, end]
    running = await start_proxy(capture=CAPTURE[capture])

    received = await running.send(wire.post(plain.request, path=plain.path))

    body, ended = read_chunks(received.partition(b"\r\n\r\n")[2])
    whole = b"".join(item.partition(b"\r\n")[2][:-2] for item in plain.chunks[:4])
    assert body.startswith(whole)
    theirs = wire.recording(f"{surface}_failing.plain")
    if surface == "responses":  # vLLM breaks the connection there, and so do we
        assert (body, ended) == (whole, False)
        assert theirs.chunks[-1] != b"0\r\n\r\n"
    else:
        count = 1 if surface == "messages" else 2
        ours = last_events(body, count)
        assert (body, ended) == (whole + b"\n\n".join(ours) + b"\n\n", True)
        real = last_events(theirs.body, count)
        assert shape(ours[0]) == shape(real[0])
        assert ours[1:] == real[1:]
    if capture == "on":
        exchange = (await running.captured(1))[0]
        assert (exchange.outcome, exchange.surface) == ("upstream_error", surface)
        assert exchange.untrainable_reason == "upstream_error"
    assert running.metric("sidecar_exchanges_total", outcome="upstream_error") == 1
    assert running.metric("sidecar_streams_open") == 0


def shape(event: bytes) -> Any:
    """The names and types that a client's library reads, without the words."""
    *lines, data = event.decode().split("\n")
    told = json.loads(data.removeprefix("data: "))
    told["error"]["message"] = ""
    return lines, told, list(told), list(told["error"])


@pytest.mark.parametrize(("surface", "capture"), KINDS)
async def test_a_stream_lost_inside_an_event_gives_no_half_event_that_reads_as_whole(
    surface: str, capture: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    """Edited streams go out event by event, so the half one is left out and the error follows.
    What is passed as it came has gone out already: then the connection breaks."""
    plain, sent = streams(surface, capture, wire)
    half = sent.chunks[4].partition(b"\r\n")[2][:60]
    fake_vllm.script = lambda _: [sent.head, *sent.chunks[:4], wire.chunk(half), 0.02, wire.RESET]
    running = await start_proxy(capture=CAPTURE[capture])

    received = await running.send(wire.post(plain.request, path=plain.path))

    body, ended = read_chunks(received.partition(b"\r\n\r\n")[2])
    whole = b"".join(item.partition(b"\r\n")[2][:-2] for item in plain.chunks[:4])
    if sent is not plain:
        assert body.startswith(whole + b'data: {"error": {"message": ')
        assert (body.endswith(b"data: [DONE]\n\n"), ended) == (True, True)
    else:
        assert (body, ended) == (whole + half, False)
    assert running.metric("sidecar_exchanges_total", outcome="upstream_error") == 1


@pytest.mark.parametrize(("surface", "capture"), KINDS)
async def test_a_failure_that_vllm_tells_itself_is_passed_on_and_never_learned_from(
    surface: str, capture: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    theirs = wire.recording(f"{surface}_failing.plain")
    fake_vllm.script = lambda _: [theirs.reply, 0.02, wire.CLOSE]
    running = await start_proxy(capture=CAPTURE[capture])

    received = await running.send(wire.post(theirs.request, path=theirs.path))

    body, ended = read_chunks(received.partition(b"\r\n\r\n")[2])
    assert (body, ended) == (theirs.body, surface != "responses")
    if capture == "on":
        exchange = (await running.captured(1))[0]
        assert (exchange.outcome, exchange.untrainable_reason) == (
            "upstream_error",
            "upstream_error",
        )


@pytest.mark.parametrize("surface", SURFACES)
async def test_vllm_silent_in_a_stream_ends_it_after_the_timeout(
    surface: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    plain, sent = streams(surface, "on", wire)
    fake_vllm.script = lambda _: [sent.head, *sent.chunks[:4], asyncio.Event()]
    running = await start_proxy(proxy={"upstream_timeout_s": 0.1})

    async with asyncio.timeout(60):
        received = await running.send(wire.post(plain.request, path=plain.path))
        await fake_vllm.client_left.wait()

    body, ended = read_chunks(received.partition(b"\r\n\r\n")[2])
    assert ended is (surface != "responses")
    assert (b"it was silent for 0.1 s" in body) is (surface != "responses")
    exchange = (await running.captured(1))[0]
    assert exchange.outcome == "upstream_error"


@pytest.mark.parametrize("surface", ["chat", "messages"])
async def test_vllm_silent_from_the_start_gives_504(
    surface: str, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    item = wire.recording(f"{surface}.plain")
    fake_vllm.script = lambda _: [asyncio.Event()]
    running = await start_proxy(proxy={"upstream_timeout_s": 0.1})

    async with asyncio.timeout(60):
        received = await running.send(wire.post(item.request, path=item.path))
        await fake_vllm.client_left.wait()

    line, headers, body = wire.split(received)
    assert line == "HTTP/1.1 504 Gateway Timeout"
    assert b"it was silent for 0.1 s" in body
    assert headers["x-sidecar-adapter"] == "base"
    assert len(fake_vllm.requests) == 1
    exchange = (await running.captured(1))[0]
    assert (exchange.status, exchange.outcome) == (504, "upstream_error")


async def test_a_stream_that_is_slow_but_not_silent_is_not_ended(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    plain, sent = streams("chat", "on", wire)
    steps: list[Any] = [sent.head]
    for item in sent.chunks:
        steps += (0.15, item)
    fake_vllm.script = lambda _: steps
    running = await start_proxy(proxy={"upstream_timeout_s": 1.0})

    received = await running.send(wire.post(plain.request, path=plain.path))

    assert wire.split(received)[2] == plain.body
