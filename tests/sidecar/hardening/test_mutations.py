"""Valid requests, damaged at random, over a real connection to a running relay. Whatever came of
it: no exception reached the loop (`nothing_unhandled`), vLLM got only requests of the grammar
(`fake_vllm`), the client got whole replies and then the end, and where a strict second parser reads
the same bytes, it reads the same requests."""

from __future__ import annotations

from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from support.proxy_kit import Running, StartProxy
from support.strict_peers import Connect, StrictVllm, Tools

BODY = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"
SEEDS = (
    HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n3\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (BODY[:3], len(BODY) - 3, BODY[3:]),
    (HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) * 2,
    HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
)
TOKENS: tuple[bytes, ...] = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b"0",
    b"9",
    b"chunked",
    b",",
    b";",
)
TOKENS += (b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n")
TOKENS += (b"HTTP/1.0", b"HEAD ", b"\xff", b"{", b'"', b"\r\n\r\n", b"0\r\n\r\n", b"%2e", b"../")
MUTATION = st.tuples(
    st.sampled_from(("insert", "delete", "replace", "repeat")),
    st.integers(0, 400),
    st.integers(1, 12),
    st.sampled_from(TOKENS),
)


def damaged(seed: bytes, mutations: list[tuple[str, int, int, bytes]]) -> bytes:
    data = bytearray(seed)
    for kind, place, length, token in mutations:
        at = place % (len(data) + 1)
        if kind == "insert":
            data[at:at] = token
        elif kind == "delete":
            del data[at : at + length]
        elif kind == "replace":
            data[at : at + len(token)] = token
        else:
            data[at:at] = data[at : at + length]
    return bytes(data)


def read_strictly(data: bytes) -> list[tuple[bytes, bytes, bytes]] | None:
    """The requests that h11 reads; None when it refuses any of it."""
    found = []
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    server.receive_data(data)
    request, body = None, b""
    while True:
        try:
            event = server.next_event()
        except h11.RemoteProtocolError:
            return None
        if isinstance(event, h11.Request):
            request, body = event, b""
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            found.append((bytes(request.method), bytes(request.target), body))
            rest = server.trailing_data[0]
            server = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
            server.receive_data(rest)
        else:
            return found


@pytest.fixture
async def running(start_proxy: StartProxy) -> Running:
    return await start_proxy(
        proxy={"head_timeout_s": 0.08, "body_timeout_s": 0.08, "idle_timeout_s": 0.08},
        capture={"sample_rate": 0.0},
    )


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.sampled_from(SEEDS), st.lists(MUTATION, min_size=1, max_size=4))
async def test_a_damaged_request_gets_an_answer_or_the_end(
    running: Running,
    dial: Connect,
    fake_vllm: StrictVllm,
    tools: Tools,
    seed: bytes,
    mutations: list[Any],
) -> None:
    sent = damaged(seed, mutations)
    fake_vllm.requests.clear()
    client = await dial(running)
    client.say(sent)

    statuses = []
    method = b"HEAD" if sent.lstrip().startswith(b"HEAD") else b"POST"
    while (reply := await client.hear_or_end(method)) is not None:
        statuses.append(reply.status)
    client.hang_up()

    assert set(statuses) <= {200, 400, 404, 405, 408, 413, 431}, statuses
    strict = read_strictly(sent)
    if strict is not None:
        got = [(seen.method, seen.target, seen.body) for seen in fake_vllm.requests]
        assert got == [item for item in strict if item in got][: len(got)]
