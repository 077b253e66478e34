"""A long body arrives whole, and is sent on in pieces without a copy."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sidecar.relay.request_edit import JOINED_BYTES, PiecedBody, edit_request, splice_request
from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

SIZE = 300_000
MODEL = "smollm2-135m"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"


def request(letter: str = "x", size: int = SIZE) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": letter * size}], "model": MODEL}
    ).encode()


def sent(body: bytes, more: bytes = b"") -> bytes:
    return HEAD % (len(body), more) + body


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
    same_head: bool, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
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
