"""Many requests on one connection: each gets its own reply, in order, whatever stands between them.
And the ways in which a client ends a connection early."""

from __future__ import annotations

import asyncio

from support.proxy_kit import StartProxy
from support.strict_peers import REQUEST, Connect, Seen, StrictVllm, post


def echo(seen: Seen) -> list[bytes]:
    return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(seen.body) + seen.body]


async def test_a_hundred_requests_in_one_write_are_answered_in_order(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """All kinds of requests: relayed, refused by path or body, answered by the application."""
    fake_vllm.script = echo
    client = await dial(await start_proxy(capture={"sample_rate": 0.0}))
    sent, expected = [], []
    for number in range(100):
        body = b'{"n":%d}' % number
        kind = number % 5
        if kind == 3:
            sent.append(post(b"not json"))
        elif kind == 2:
            sent.append(post(body, path=b"/v1/load_lora_adapter"))
        elif kind == 4:
            sent.append(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        else:
            sent.append(post(body))
        status = {2: 404, 3: 400}.get(kind, 200)
        expected.append((status, body if kind < 2 else None))

    client.say(b"".join(sent))

    for number, (status, wanted) in enumerate(expected):
        reply = await client.hear(b"GET" if number % 5 == 4 else b"POST")
        assert (reply.status, reply.body if wanted else None) == (status, wanted), number
    assert [seen.body for seen in fake_vllm.requests] == [b for _, b in expected if b]


async def test_what_comes_early_waits_and_is_bounded(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """While a request is in flight the rest stays in the socket: 20 MB are not taken in."""
    go_on = asyncio.Event()
    fake_vllm.script = lambda seen: [go_on, *echo(seen)] if seen.body == b"{}" else echo(seen)
    client = await dial(await start_proxy(capture={"sample_rate": 0.0}))
    body = b'{"x":"' + b"a" * 200_000 + b'"}'
    client.say(post(b"{}") + post(body) * 100)

    before = -1
    while (left := client.writer.transport.get_write_buffer_size()) != before:
        before = left
        await asyncio.sleep(0.1)

    assert left > 10_000_000  # the rest stands in the kernel's buffers, about 6 MB
    assert len(fake_vllm.requests) == 1
    go_on.set()
    assert (await client.hear()).body == b"{}"
    for _ in range(100):
        assert (await client.hear()).body == body


async def test_nothing_behind_connection_close_is_read(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    client = await dial(await start_proxy(capture={"sample_rate": 0.0}))

    client.say(post(REQUEST, b"Connection: close") + post())

    reply = await client.hear()
    assert (reply.status, reply.header(b"connection")) == (200, b"close")
    assert await client.closed()
    assert len(fake_vllm.requests) == 1


async def test_a_half_closed_client_is_a_client_that_left(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """`shutdown(SHUT_WR)` and `close()` look the same on the wire, and the work for a client that
    left must end at once. nginx (499) and uvicorn decide the same way."""
    never = asyncio.Event()
    fake_vllm.script = lambda _: [never]
    running = await start_proxy()
    client = await dial(running)
    client.say(post())
    await fake_vllm.asked()

    client.writer.write_eof()

    async with asyncio.timeout(60):
        await fake_vllm.client_left.wait()
    assert await client.closed()
    assert running.metric("sidecar_requests_total", status="499") == 1
    assert (await running.captured(1))[0].outcome == "cut"


async def test_a_client_that_ends_in_the_middle_of_a_request_gets_nothing_relayed(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy()
    for cut in (1, 10, 60, len(post()) - 1):
        client = await dial(running)
        client.say(post()[:cut])
        client.writer.write_eof()

        reply = await client.hear_or_end()

        assert reply is None or reply.status == 400
        assert await client.closed()
    assert fake_vllm.requests == []


async def test_expect_100_is_answered_once_and_only_when_the_body_is_wanted(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy(capture={"sample_rate": 0.0})
    expects = post(REQUEST, b"Expect: 100-continue")
    head, _, _ = expects.partition(b"\r\n\r\n")
    cases = {
        # The body came with the head: nobody waits, and RFC 9110 10.1.1 allows to leave it out.
        (expects,): ((), 200),
        (head + b"\r\n\r\n", REQUEST): ((100,), 200),
        (head + b"\r\n\r\n" + REQUEST[:1], REQUEST[1:]): ((), 200),
        (head.replace(b"100-continue", b"100-CONTINUE") + b"\r\n\r\n", REQUEST): ((100,), 200),
        # A client of HTTP/1.0 could not read it.
        (head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n\r\n", REQUEST): ((), 200),
    }
    for pieces, (interim, status) in cases.items():
        client = await dial(running)
        await client.say_apart(*pieces)

        reply = await client.hear()

        assert (reply.status, reply.interim) == (status, interim), pieces
    assert {seen.header(b"expect") for seen in fake_vllm.requests} == {None}


async def test_replies_to_http_1_0_close(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """Also when it asks for keep-alive, which HTTP/1.0 never defined well; as uvicorn does not."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    for fields in ((), (b"Connection: keep-alive",)):
        client = await dial(running)
        client.say(post(REQUEST, *fields).replace(b"HTTP/1.1", b"HTTP/1.0"))

        reply = await client.hear()

        assert (reply.status, reply.header(b"connection")) == (200, b"close")
        assert await client.closed()
