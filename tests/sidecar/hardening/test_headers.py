"""What stands in a header stays in it: nothing that a peer sends begins a line of its own. And
headers that belong to one connection go no further, those that `Connection` names included."""

from __future__ import annotations

import contextlib

import pytest

from support.fake_vllm import Step
from support.proxy_kit import StartProxy
from support.strict_peers import Connect, StrictVllm

REQUEST = b'{"model":"smollm2-135m","messages":[{"role":"user","content":"Hi"}]}'
OWN_NAMES: tuple[bytes, ...] = (
    b"x-sidecar-session",
    b"x-sidecar-user",
    b"x-sidecar-capture",
    b"x-sidecar-adapter",
)
OWN_NAMES += (b"traceparent", b"authorization", b"x-request-id", b"idempotency-key")
BREAKS = (b"\r\nX-Evil: 1", b"\nX-Evil: 1", b"\rX-Evil: 1", b"\x00", b"\r\n\r\nHTTP/1.1 200 OK")


def post(*fields: bytes, body: bytes = REQUEST) -> bytes:
    lines = (b"POST /v1/chat/completions HTTP/1.1", b"Host: x", *fields)
    return b"\r\n".join((*lines, b"Content-Length: %d" % len(body), b"", body))


def reply(*fields: bytes, status: bytes = b"200 OK", body: bytes = b"{}") -> bytes:
    lines = (b"HTTP/1.1 " + status, *fields, b"content-length: %d" % len(body), b"", body)
    return b"\r\n".join(lines)


async def test_an_adapter_name_with_a_line_break_cannot_become_a_header(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """The table comes from the store, which is trusted less than this process."""
    from sidecar.routing.table import RoutingTable

    running = await start_proxy()
    for generation, text in enumerate(BREAKS, start=1):
        fake_vllm.requests.clear()
        with contextlib.suppress(ValueError):  # a table that refuses such a name is as good
            running.proxy.routing.table = RoutingTable(
                model="smollm2-135m", champion="v1" + text.decode(), generation=generation
            )
        client = await dial(running)

        client.say(post())

        answer = await client.hear()  # h11 refuses a head that is not of the grammar
        assert answer.header(b"x-evil") is None
        assert len(fake_vllm.requests) <= 1


async def test_a_line_break_in_a_header_of_vllm_does_not_reach_the_client(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy()
    bad: tuple[bytes, ...] = (
        b"X: a\rX-Evil: 1",
        b"X: a\x00b",
        b"X: a\x01b",
        b"X: a\x7fb",
        b"X Y: a",
        b"X\x00: a",
    )
    bad += (b"X: a\n\x20b", b"X: a\r\n b", b" X: a", b"X : a", b"X: a\x0bb", b"\x01: a", b": a")
    statuses = {}
    for field in bad:
        fake_vllm.play(reply(field))
        client = await dial(running)
        client.say(post())
        answer = await client.hear()  # raises when the head is not of the grammar
        statuses[field] = (answer.status, answer.header(b"x-evil"))

    assert set(statuses.values()) == {(502, None)}, statuses
    for status, expected in ((b"200 O\rK", 502), (b"200 \x7f", 502), (b"200", 200)):
        fake_vllm.play(reply(status=status))
        client = await dial(running)
        client.say(post())
        assert (await client.hear()).status == expected, status


async def test_headers_of_one_connection_go_no_further_either_way(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    fields = (
        b"Connection: keep-alive, X-Hop , x-other,, \t",
        b"CONNECTION: x-third",
        b"Keep-Alive: timeout=5",
        b"X-Hop: 1",
        b"x-OTHER: 2",
        b"X-Third: 3",
        b"TE: trailers",
        b"Trailer: X-T",
        b"Proxy-Connection: keep-alive",
        b"Proxy-Authenticate: Basic",
        b"Upgrade: websocket",
        b"X-End: to-end",
    )
    fake_vllm.script = lambda _: [reply(*fields)]
    running = await start_proxy(capture={"sample_rate": 0.0})
    client = await dial(running)

    client.say(post(*fields, b"Proxy-Authorization: Basic eA==", b"HTTP2-Settings: x"))

    answer = await client.hear()
    names = {name for name, _ in fake_vllm.requests[0].headers}
    assert names == {b"host", b"x-end", b"content-length"}
    own = {b"x-sidecar-exchange-id", b"x-sidecar-adapter"}
    assert {name for name, _ in answer.headers} == {b"x-end", b"content-length"} | own


async def test_connection_cannot_name_what_frames_or_routes_the_message(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """`Connection: content-length, host` has taken headers away from behind other proxies."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    named = b"Connection: content-length, host, content-type, authorization, x-sidecar-adapter"
    fake_vllm.script = lambda _: [reply(named, b"content-type: application/json")]
    client = await dial(running)

    client.say(post(named, b"Content-Type: application/json", b"Authorization: Bearer k"))

    answer = await client.hear()
    seen = fake_vllm.requests[0]
    assert (answer.status, answer.body, seen.body) == (200, b"{}", REQUEST)
    assert seen.header(b"host") == b"127.0.0.1:%d" % fake_vllm.port
    assert seen.header(b"content-length") == b"%d" % len(REQUEST)
    assert answer.header(b"x-sidecar-adapter") == b"base"


async def test_vllm_cannot_speak_in_the_sidecars_name(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    fake_vllm.script = lambda _: [
        reply(b"X-Sidecar-Adapter: other", b"x-sidecar-exchange-id: ex_0", b"X-Sidecar-New: 1")
    ]
    client = await dial(await start_proxy())

    client.say(post())

    answer = await client.hear()
    names = [name for name, _ in answer.headers if name.startswith(b"x-sidecar")]
    assert sorted(names) == [b"x-sidecar-adapter", b"x-sidecar-exchange-id"]
    assert answer.header(b"x-sidecar-adapter") == b"base"


async def test_the_limits_of_a_head_are_where_they_are_said_to_be(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """128 headers and 64 KiB pass. One header more does not, nor do a few bytes more (what comes at
    once is measured without the few that are the same in every head)."""
    running = await start_proxy(capture={"sample_rate": 0.0})

    def head_of(size: int) -> bytes:
        start = b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: "
        return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"

    def many(count: int) -> bytes:
        lines = b"".join(b"X-%d: 1\r\n" % number for number in range(count - 1))
        return b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n"

    sent = {head_of(65_536): 200, head_of(65_600): 431, many(128): 200, many(129): 431}
    for data, status in sent.items():
        for pieces in ((data,), (data[:100], data[100:-1], data[-1:])):
            client = await dial(running)
            for piece in pieces:
                client.say(piece)
                await client.writer.drain()
            assert (await client.hear(b"GET")).status == status, (len(data), len(pieces))


async def test_a_secret_is_in_no_error_and_in_no_log(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every way in which a request may fail, with a key in its headers and one in its body."""
    running = await start_proxy()
    key = (b"Authorization: Bearer sk-secret-1", b"x-api-key: sk-secret-1")
    body = REQUEST[:-1] + b',"user":"sk-secret-2"}'
    gone = reply(status=b"404 Not Found", body=b'{"error":{"type":"NotFoundError"}}')
    scripts: tuple[list[Step], ...] = (
        [b"rubbish\r\n"],
        ["reset"],
        ["close"],
        [gone],
        [b"HTTP/1.1 200 OK\r\n", "reset"],
    )
    for script in scripts:
        fake_vllm.play(*script)
        client = await dial(running)
        client.say(post(*key, body=body))
        answer = await client.hear()
        assert b"secret" not in answer.body + b"".join(b"%b%b" % pair for pair in answer.headers)
    broken = (b"Content-Length: x", b"Transfer-Encoding: x", b"X\x00: 1", b"Upgrade: h2c")
    for field in broken:
        client = await dial(running)
        client.say(post(*key, field, body=body))
        answered = await client.hear_or_end()
        assert answered is None or b"secret" not in answered.body
    await fake_vllm.stop()
    client = await dial(running)
    client.say(post(*key, body=body))
    assert b"secret" not in (await client.hear()).body

    await running.proxy.stop()
    logged = "".join(capfd.readouterr())
    assert "upstream_failed" in logged
    assert "secret" not in logged
