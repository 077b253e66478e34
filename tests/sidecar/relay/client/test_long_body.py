"""A long body is read to its place and sent on in pieces: nobody sees that but the profiler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.relay.client.long_body import AHEAD, LONG_BYTES, LongBody
from sidecar.relay.client.request_parser import RequestParser
from sidecar.relay.flight.client_request import ClientRequest
from sidecar.relay.payload.request_edit import (
    JOINED_BYTES,
    PiecedBody,
    edit_request,
    splice_request,
)

SIZE = 300_000
MODEL = "smollm2-135m"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"


def request(letter: str = "x", size: int = SIZE, model: str = MODEL) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": letter * size}], "model": model}
    ).encode()


def sent(body: bytes, more: bytes = b"") -> bytes:
    return HEAD % (len(body), more) + body


# -- the buffer


@given(st.integers(1, 5_000), st.data())
def test_the_body_is_what_was_written_into_its_room(length: int, data: Any) -> None:
    whole = bytes(i % 251 for i in range(length + 1))
    first = data.draw(st.integers(1, length))
    body = LongBody(length + 1, whole[:first])
    while not body.whole:
        room = body.room()
        count = data.draw(st.integers(1, len(room)))
        room[:count] = whole[body.came : body.came + count]
        room.release()
        body.took(count)

    taken = body.take()

    assert isinstance(taken, bytes)
    assert taken == whole


def test_a_length_that_is_only_announced_holds_no_memory() -> None:
    body = LongBody(2**40, b"x" * 1000)

    with body.room() as room:
        assert len(room) <= AHEAD * LONG_BYTES


# -- the parser


def feed_past(parser: RequestParser, data: bytes, cuts: Sequence[int]) -> int:
    """Feed what was sent in these reads, the long bodies in it past the parser. Returns: how many
    bodies were."""
    past = 0
    for start, end in pairwise([0, *cuts, len(data)]):
        parser.feed(data[start:end])
        long = parser.long_body() if parser.begun else None
        if long is None:
            continue
        past += 1
        at = end
        while not long.whole:
            with long.room() as room:
                count = min(len(room), 50_000, len(data) - at)
                room[:count] = data[at : at + count]
            long.took(count)
            at += count
        parser.long_body_whole(long.take())
        rest = data[at:]
        if rest:
            past += feed_past(parser, rest, [cut - at for cut in cuts if cut > at])
        return past
    return past


@given(st.lists(st.sampled_from(["long", "other", "short"]), min_size=1, max_size=4), st.data())
def test_what_is_read_past_the_parser_is_what_it_would_have_read(
    kinds: list[str], data: Any
) -> None:
    bodies = [
        request("ab"[i % 2], size=200 if kind == "short" else 100_000)
        for i, kind in enumerate(kinds)
    ]
    whole = b"".join(
        sent(body, b"X-Other: 1\r\n" if kind == "other" else b"")
        for kind, body in zip(kinds, bodies, strict=True)
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=6)))
    parser = RequestParser(max_body_bytes=2**20)

    feed_past(parser, whole, cuts)

    assert [isinstance(item, ClientRequest) for item in parser.ready] == [True] * len(bodies)
    assert [item.body for item in parser.ready] == bodies
    assert not parser.begun
    assert parser.body_bytes == 0


@pytest.mark.parametrize("seen_before", [False, True])
def test_both_kinds_of_head_may_have_a_body_read_past_the_parser(seen_before: bool) -> None:
    body = request()
    parser = RequestParser(max_body_bytes=2**20)
    if seen_before:
        parser.feed(sent(body))
        parser.ready.clear()

    assert feed_past(parser, sent(body), [1_000]) == 1

    [found] = parser.ready
    assert isinstance(found, ClientRequest)
    assert found.body == body
    assert found.head.keep_alive


def test_chunks_and_what_is_nearly_here_stay_with_the_parser() -> None:
    chunked = RequestParser(max_body_bytes=2**20)
    chunked.feed(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n40000\r\nabc")
    assert chunked.long_body() is None
    nearly = RequestParser(max_body_bytes=2**20)
    body = request()
    nearly.feed(sent(body)[: -(LONG_BYTES - 1)])
    assert nearly.long_body() is None
    nothing_yet = RequestParser(max_body_bytes=2**20)
    nothing_yet.feed(HEAD % (SIZE, b""))
    assert nothing_yet.long_body() is None


# -- the pieces


@given(
    st.lists(
        st.sampled_from(
            [
                ("messages", "x" * JOINED_BYTES),
                ("stream", True),
                ("stop", ["model", '"model":"m"']),
                ("metadata", {"model": "m"}),
                ("tools", [{"model": "m"}]),
            ]
        ),
        unique_by=lambda member: member[0],
    ),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_long_body_is_edited_by_pieces_as_it_would_be_whole(
    others: list[tuple[str, Any]], place: int, spaced: bool
) -> None:
    members = dict(others) | {"messages": "x" * JOINED_BYTES}
    listed = list(members.items())
    listed.insert(place, ("model", "m"))
    separators = (", ", ": ") if spaced else (",", ":")
    body = json.dumps(dict(listed), separators=separators).encode()

    spliced = splice_request(body, b'"m"', b'"m--v2"', b'"logprobs":true,')

    if spliced is not None:
        assert isinstance(spliced, PiecedBody)
        joined = b"".join(spliced.pieces)
        assert spliced.length == len(joined)
        expected = edit_request(body, {"model": b'"m--v2"', "logprobs": b"true"})
        assert json.loads(joined) == json.loads(expected)


@pytest.mark.parametrize(
    "front",
    [
        '{"model":"m",',
        '{ "model": "m",',
        '{"stream":true,"model":"m",',
        '{"a":{"b":[1]},"model":"m",',
    ],
)
def test_a_model_in_front_of_a_long_body_is_found_at_a_glance(front: str) -> None:
    tools = '"tools":[{"model":1},{"model":1},{"model":1},{"model":1}]'
    body = f'{front}"messages":"{"x" * JOINED_BYTES}",{tools}}}'.encode()

    assert isinstance(splice_request(body, b'"m"', b'"n"', b""), PiecedBody)


# -- on the wire


@pytest.mark.parametrize("same_head", [True, False])
async def test_long_and_short_requests_reach_vllm_as_they_are(
    same_head: bool, fake_vllm: Any, start_proxy: Any, wire: Any
) -> None:
    running = await start_proxy(capture={"sample_rate": 0.0})
    bodies = [request("a", size) for size in (9, SIZE, SIZE + 1, 10, 2_000_000)]
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    # All at once: what follows a long body is not taken for a part of it.
    for number, body in enumerate(bodies):
        writer.write(sent(body, b"" if same_head else b"X-Number: %d\r\n" % number))
    for _ in bodies:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        await reader.readexactly(int(length))
    writer.close()

    assert [json.loads(seen.body) for seen in fake_vllm.requests] == [
        json.loads(body) for body in bodies
    ]


async def test_a_long_body_after_100_continue(fake_vllm: Any, start_proxy: Any, wire: Any) -> None:
    running = await start_proxy(capture={"sample_rate": 0.0})
    body = request()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(HEAD % (len(body), b"Expect: 100-continue\r\nConnection: close\r\n"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)

    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    assert json.loads(fake_vllm.requests[0].body) == json.loads(body)


async def test_a_client_that_stops_within_a_long_body_is_told_so(
    fake_vllm: Any, start_proxy: Any, wire: Any
) -> None:
    running = await start_proxy(proxy={"body_timeout_s": 0.2})
    body = request()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent(body)[:200_000])
    await asyncio.sleep(0)

    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(body[:1000])  # still sending
    rest = await reader.read()
    writer.transport.abort()

    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive in time" in rest
    assert fake_vllm.requests == []
    assert running.metric("sidecar_clients_cut_total", reason="too_slow") == 1


async def test_a_client_that_leaves_within_a_long_body_leaves_nothing_behind(
    fake_vllm: Any, start_proxy: Any, wire: Any
) -> None:
    running = await start_proxy()
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent(request())[:200_000])
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()
    async with asyncio.timeout(60):
        while running.proxy._relay._connections:
            await asyncio.sleep(0.005)

    assert fake_vllm.requests == []
    assert running.metric("sidecar_requests_in_flight") == 0


async def test_a_long_request_is_captured_whole(
    fake_vllm: Any, start_proxy: Any, wire: Any
) -> None:
    running = await start_proxy()
    body = request()

    received = await running.send(sent(body, b"Connection: close\r\n"))

    assert received.startswith(b"HTTP/1.1 200 OK")
    [exchange] = await running.captured(1)
    assert json.loads(exchange.request)["messages"] == json.loads(body)["messages"]
    assert json.loads(fake_vllm.requests[0].body)["return_token_ids"] is True
