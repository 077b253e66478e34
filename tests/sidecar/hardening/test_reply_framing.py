"""Replies of vLLM in every framing there is, and in some that must not be. The client gets one
whole reply or a broken connection, and the reply of one request is never another's."""

from __future__ import annotations

import asyncio

from support.proxy_kit import StartProxy
from support.strict_peers import Connect, StrictVllm, Tools

REQUEST = b'{"model":"smollm2-135m","messages":[]}'
OK = b"HTTP/1.1 200 OK\r\n"


def post(number: int = 0, close: bool = False) -> bytes:
    body = b'{"n":%d}' % number
    ending = b"Connection: close\r\n" if close else b""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
    return head % (ending, len(body)) + body


AMBIGUOUS = [
    b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    b"Content-Length: 2, 2\r\n\r\n{}",
    b"Content-Length: +2\r\n\r\n{}",
    b"Content-Length: 0x2\r\n\r\n{}",
    b"Content-Length: -2\r\n\r\n{}",
    b"Content-Length:\r\n\r\n{}",
    b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    b"Content-Length : 2\r\n\r\n{}",
    b"Content-Length: 2\n\r\n{}",
    b"Content-Length: 2\r\n\n{}",
    b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: gzip\r\n\r\n{}",
]


async def test_a_reply_with_an_ambiguous_end_gives_502_or_a_break(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm, tools: Tools
) -> None:
    """Never a whole reply: what it says cannot be known. And its connection is never used again."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    whole = {}
    for number, rest in enumerate(AMBIGUOUS):
        fake_vllm.play(OK + rest, "close")
        client = await dial(running)
        client.say(post(number))
        before = fake_vllm.connections
        try:
            reply = await client.hear_or_end()
        except tools.BrokenReply:
            reply = None
        if reply is not None and reply.status != 502:
            whole[rest] = reply
        assert fake_vllm.connections <= before + 1
        client.hang_up()

    assert whole == {}


async def test_a_second_reply_behind_the_first_is_nobodys(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """Response splitting: what stands behind a reply must not answer the next request."""
    reply, evil = OK + b"Content-Length: 2\r\n\r\n{}", OK + b"Content-Length: 4\r\n\r\nevil"
    running = await start_proxy(capture={"sample_rate": 0.0})
    for plan in ([reply + evil], [reply, evil], [reply, b"rubbish"], [reply + b"\r\n\r\n", evil]):
        for number in range(3):
            if number == 0:
                fake_vllm.play(*plan)
            else:
                fake_vllm.play(OK + b"Content-Length: 1\r\n\r\n%d" % number)
            client = await dial(running)
            client.say(post(number))

            answer = await client.hear()

            assert (answer.status, answer.body) == (200, b"{}" if number == 0 else b"%d" % number)


async def test_bytes_that_come_between_two_requests_are_nobodys(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    late = asyncio.Event()
    reply = OK + b"Content-Length: 2\r\n\r\n{}"
    running = await start_proxy(capture={"sample_rate": 0.0})
    fake_vllm.script = lambda _: [reply, late, OK + b"Content-Length: 4\r\n\r\nevil"]
    client = await dial(running)
    client.say(post(1))
    assert (await client.hear()).body == b"{}"

    late.set()
    async with asyncio.timeout(60):
        while fake_vllm.written_bytes == len(reply):
            await asyncio.sleep(0.001)
    fake_vllm.script = lambda _: [OK + b"Content-Length: 3\r\n\r\nnew"]
    client.say(post(2))

    assert (await client.hear()).body == b"new"


async def test_interim_replies_are_not_the_reply(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """100 belongs to the one who asked for it, and the relay never did; others are not passed on
    either, as nginx does it: a client of HTTP/1.0 could not read them."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    final = OK + b"Content-Length: 2\r\n\r\n{}"
    for interim in (
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
    ):
        for pieces in ([interim + final], [interim, final], [interim[:9], interim[9:], final]):
            fake_vllm.play(*pieces)
            client = await dial(running)
            client.say(post())

            reply = await client.hear()

            assert (reply.status, reply.body, reply.interim) == (200, b"{}", ()), interim
            assert reply.header(b"link") is None


async def test_switching_protocols_that_nobody_asked_for_gives_502(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy(capture={"sample_rate": 0.0})
    head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    for pieces in ([head], [head, b"\x00\x01\x02"], [head + OK + b"Content-Length: 0\r\n\r\n"]):
        fake_vllm.play(*pieces, "close")
        client = await dial(running)
        client.say(post())

        assert (await client.hear()).status == 502, pieces


async def test_replies_without_a_body_leave_the_connection_in_step(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """204 and 304 have none whatever their head says; the next reply comes on the same line."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    client = await dial(running)
    for head in (
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ):
        fake_vllm.play(head)
        client.say(post())
        reply = await client.hear()
        assert (reply.status, reply.body) == (int(head[9:12]), b"")
        assert reply.header(b"transfer-encoding") is None

        fake_vllm.script = lambda _: [OK + b"Content-Length: 4\r\n\r\nnext"]
        client.say(post())
        assert (await client.hear()).body == b"next"


async def test_head_gets_the_head_and_nothing_else(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy()
    sent = b"HEAD /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n"
    client = await dial(running)
    for head in (b"Content-Length: 99\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"\r\n"):
        fake_vllm.play(OK + b"X: 1\r\n" + head)
        client.say(sent)
        reply = await client.hear(b"HEAD")
        assert (reply.status, reply.body, reply.header(b"x")) == (200, b"", b"1")

    for path in (b"/healthz", b"/metrics", b"/nowhere", b"/v1/models"):
        client.say(b"HEAD %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        assert (await client.hear(b"HEAD")).body == b""
    fake_vllm.script = lambda _: [OK + b"Content-Length: 4\r\n\r\nlast"]
    client.say(post())
    assert (await client.hear()).body == b"last"


async def test_a_reply_that_ends_with_its_connection(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """Only a clean end of the connection ends such a reply; a reset breaks it."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    for head in (OK + b"\r\n", OK + b"Connection: close\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"):
        fake_vllm.play(head + b"abc", b"def", "close")
        client = await dial(running)
        client.say(post())
        assert (await client.hear()).body == b"abcdef"

    fake_vllm.script = lambda _: [OK + b"\r\n", b"abcdef", "reset"]
    client = await dial(running)
    client.say(post())
    reader = client.reader
    received = await reader.read()
    assert received == b"" or not received.endswith(b"0\r\n\r\n")


async def test_a_reply_before_the_whole_request_is_read_is_passed_on(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    """vLLM refuses a long body early. Its words come through, and no request is queued behind what
    it may never read: 20 MB are more than the sockets' buffers hold."""
    running = await start_proxy(capture={"sample_rate": 0.0})
    client = await dial(running)
    body = b'{"model":"smollm2-135m","x":"' + b"a" * 20_000_000 + b'"}'
    fake_vllm.early_reply = b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge"
    client.say(post().replace(b"Content-Length: 7", b"Content-Length: %d" % len(body))[:-7] + body)

    reply = await client.hear()
    fake_vllm.early_reply = b""
    client.say(post(2))
    second = await client.hear()

    assert (reply.status, reply.body) == (413, b"large")
    assert (second.status, second.body) == (200, b"{}")
    assert [len(seen.body) for seen in fake_vllm.requests] == [7]
