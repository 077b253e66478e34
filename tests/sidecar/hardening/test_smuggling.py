"""Requests that two servers could read in two ways: refused, or passed on as exactly one. Each is
followed by a request for a path that must never be reached. A refusal must end the connection, so
that nothing behind it is read; an odd but legal request must be answered, and the one behind it
must get a 404 of its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sidecar.relay.context import ClientRequest
from sidecar.relay.refusals import Refusal
from sidecar.relay.request_parser import RequestParser
from support.proxy_kit import Running, StartProxy
from support.strict_peers import REQUEST, Connect, StrictVllm

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HEAD = LINE + b"Host: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
ONE_CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(REQUEST), REQUEST)
BEHIND = b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def length(value: bytes) -> bytes:
    return HEAD + b"Content-Length:" + value + b"\r\n\r\n" + REQUEST


def coding(value: bytes) -> bytes:
    return HEAD + b"Transfer-Encoding:" + value + b"\r\n\r\n" + ONE_CHUNK


def sized(field: bytes) -> bytes:
    return HEAD + field + b"\r\nContent-Length: %d\r\n\r\n" % len(REQUEST) + REQUEST


def chunks(body: bytes) -> bytes:
    return CHUNKED + b"\r\n" + body


async def not_refused(
    sent: Iterable[bytes],
    running: Running,
    dial: Connect,
    fake_vllm: StrictVllm,
    statuses: tuple[int, ...],
) -> dict[bytes, str]:
    """Those of `sent` that did not get one refusal and then the end, or of which vLLM heard."""
    wrong: dict[bytes, str] = {}
    for one in sent:
        fake_vllm.requests.clear()
        client = await dial(running)
        client.say(one + BEHIND)
        try:
            reply = await client.hear_or_end()
            ended = reply is not None and await client.closed()
        except TimeoutError:
            wrong[one[:120]] = "no reply, or no end"
            continue
        client.hang_up()
        told = (reply.status, reply.header(b"connection")) if reply is not None else None
        if told not in [(status, b"close") for status in statuses] or not ended:
            wrong[one[:120]] = f"{told}, ended: {ended}"
        if fake_vllm.requests:
            wrong[one[:120]] = f"vLLM got {len(fake_vllm.requests)}"
    return wrong


LENGTHS = [
    b"",
    b" ",
    b" 38,38",
    b" 38\r\nContent-Length: 38",
    b" 38.0",
    b" 3_8",
    b" \xb2",
    b" \x0c38",
    b" 38\x00",
    b" 99999999999999999999999999",
]


CODINGS = [
    b"",
    b" ",
    b" chunked, chunked",
    b" chunked,",
    b" ,chunked",
    b" chunked;q=1",
    b" x chunked",
    b" chunkedx",
    b" \x0bchunked",
    b" chunked\x00",
    b" identity",
    b" identity, chunked",
    b" chunked\r\nTransfer-Encoding: identity",
    b" identity\r\nTransfer-Encoding: chunked",
    b"\r\nTransfer-Encoding: chunked",
    b" chunked\r\nTransfer-Encoding:",
    b"\r\n chunked",
    b" chunked\r\nContent-Length: 4",
    b"\r\nContent-Length: 4",
]


FIELDS = [
    b"Transfer-Encoding : chunked",
    b" Transfer-Encoding: chunked",
    b"Transfer-Encoding\x00: chunked",
    b"X: y\rTransfer-Encoding: chunked",
    b"X: y\nTransfer-Encoding: chunked",
    b"X: y\r\r\nTransfer-Encoding: chunked",
    b"X: y\x00Transfer-Encoding: chunked",
    b"X\r\nTransfer-Encoding: chunked",
    b"X: y\n\n",
    b"X: y\r\n\tfolded",
    b"X:\r\n y",
    b"X",
    b": y",
    b"X Y: z",
    b"X\xc3\xa9: z",
    b"X: a\x00b",
    b"X: a\x7fb",
    b"Host: other",
]


STARTS = [
    b"POST /v1/chat/completions HTTP/1.1\nHost: x\r\n",
    b"POST /v1/chat/completions HTTP/1.1\rHost: x\r\n",
    b"POST /v1/chat/completions\tHTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/chat/completions HTTP/1.1 x\r\nHost: x\r\n",
    b"POST /v1/chat/completions\r\nHost: x\r\n",
    b"POST /v1/chat/completions HTTP/0.9\r\nHost: x\r\n",
    b"POST /v1/chat/completions HTTP/2.0\r\nHost: x\r\n",
    b"POST /v1/chat/completions http/1.1\r\nHost: x\r\n",
    b"POST /v1/chat/completions RTSP/1.0\r\nHost: x\r\n",
    b"post /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/chat/completions\x00 HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n Host: x\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n",
    b" POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n",
]


CHUNKS = [
    b"ffffffffffffffff1\r\n{}\r\n0\r\n\r\n",
    b"0x2\r\n{}\r\n0\r\n\r\n",
    b"-2\r\n{}\r\n0\r\n\r\n",
    b" 2\r\n{}\r\n0\r\n\r\n",
    b"g\r\n{}\r\n0\r\n\r\n",
    b"\r\n{}\r\n0\r\n\r\n",
    b";a=b\r\n{}\r\n0\r\n\r\n",
    b"2\n{}\r\n0\r\n\r\n",
    b"2;a\n{}\r\n0\r\n\r\n",
    b"2;\x00\r\n{}\r\n0\r\n\r\n",
    b"2\r\n{}0\r\n\r\n",
    b"2\r\n{}\n0\r\n\r\n",
    b"1\r\n{}\r\n0\r\n\r\n",
    b"2\r\n{}\r\n0\n\r\n",
    b"2\r\n{}\r\n0\r\nX: a\x00\r\n\r\n",
    b"2\r\n{}\r\n0\r\nX : a\r\n\r\n",
    b"2\r\n{}\r\n0\r\nX: a\n\r\n",
]


ENDLESS = [
    b"1;" + b"x" * 70_000 + b"\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    b"1" + b";a=b" * 20_000 + b"\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    b"1;xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n \r\n" * 20_000 + b"0\r\n\r\n",
    b"2\r\n{}\r\n0\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    b"2\r\n{}\r\n0\r\n" + b"X: 1\r\n" * 20_000 + b"\r\n",
]


UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Upgrade: h2c\r\n",
]


def upgrading(sent: bytes, fields: bytes) -> bytes:
    """The same request, with the wish to upgrade in its head."""
    line, _, rest = sent.partition(b"Host: x\r\n")
    return line + b"Host: x\r\n" + fields + rest


PLAIN = b"Content-Length: %d\r\n\r\n" % len(REQUEST) + REQUEST
AMBIGUOUS = [*map(length, LENGTHS), *map(coding, CODINGS), *map(chunks, CHUNKS)]
REFUSED: dict[str, tuple[list[bytes], tuple[int, ...]]] = {
    "ambiguous": (AMBIGUOUS, (400,)),
    "ambiguous with a wish to upgrade": (
        [upgrading(one, UPGRADES[0]) for one in AMBIGUOUS],
        (400,),
    ),
    "coded in HTTP/1.0": ([coding(b" chunked").replace(b"HTTP/1.1", b"HTTP/1.0")], (400,)),
    "too long": (
        [length(b" 33554433"), length(b" 9223372036854775807"), length(b" 0000000000000099999999")],
        (413,),
    ),
    "fields": ([sized(field) for field in FIELDS], (400,)),
    "request lines": ([start + PLAIN for start in STARTS], (400,)),
    "line ends": (
        [
            (HEAD + PLAIN).replace(REQUEST, b"").replace(b"\r\n", end) + REQUEST
            for end in (b"\n", b"\r", b"\n\r", b"\r\r\n")
        ],
        (400,),
    ),
    # Extensions and trailers are thrown away, so nothing but a limit of their own ends them: that
    # of heads and 16 bytes a chunk, which is Go's rule too, however large `max_body_bytes` is.
    "endless around chunks": ([chunks(one) for one in ENDLESS], (400, 413, 431)),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_what_two_servers_could_read_in_two_ways_is_refused(
    kind: str, start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    sent, statuses = REFUSED[kind]

    assert await not_refused(sent, await start_proxy(), dial, fake_vllm, statuses) == {}


LEGAL = [
    length(b" 38"),
    length(b"38"),
    length(b"\t38\t"),
    length(b" 00038"),
    coding(b" chunked"),
    coding(b"chunked"),
    coding(b"\tchunked"),
    coding(b" CHUNKED"),
    b"\r\n" + length(b" 38"),
    sized(b"X: \xff\xfe"),
    sized(b"X:"),
    sized(b"X: a\tb"),
    sized(b"!#$%&'*+-.^_`|~: z"),
    sized(b"Content_Length: 1"),
    sized(b"X-Content-Length: 1\r\nX-Transfer-Encoding: chunked"),
    chunks(b"26;a=b\r\n" + REQUEST + b"\r\n0\r\n\r\n"),
    chunks(b'26;a="b;c"\r\n' + REQUEST + b"\r\n0\r\n\r\n"),
    chunks(b"00026\r\n" + REQUEST + b"\r\n000\r\n\r\n"),
    chunks(b"26\r\n" + REQUEST + b"\r\n0\r\nX: trailer\r\n\r\n"),
    chunks(b"".join(b"1\r\n%c\r\n" % byte for byte in REQUEST) + b"0\r\n\r\n"),
]


async def test_odd_but_legal_framing_gives_vllm_exactly_one_request(
    start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy(capture={"sample_rate": 0.0})
    for sent in LEGAL:
        fake_vllm.requests.clear()
        client = await dial(running)

        client.say(sent + BEHIND)

        replies = [await client.hear(), await client.hear()]
        assert [reply.status for reply in replies] == [200, 404], sent
        assert [seen.body for seen in fake_vllm.requests] == [REQUEST], sent
        assert fake_vllm.requests[0].header(b"content-length") == b"38"
        assert fake_vllm.requests[0].header(b"x") != b"trailer"


@pytest.mark.parametrize(
    "field",
    [b"Content-Length: 80", b"Transfer-Encoding: chunked", b"Host: evil", b"Connection: close"],
)
async def test_a_trailer_is_never_taken_for_a_header(
    field: bytes, start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    client = await dial(await start_proxy(capture={"sample_rate": 0.0}))

    client.say(chunks(b"26\r\n" + REQUEST + b"\r\n0\r\n" + field + b"\r\n\r\n") + BEHIND)

    first, second = await client.hear(), await client.hear_or_end()
    assert first.status in (200, 400)  # to refuse such a trailer is as good
    assert [seen.body for seen in fake_vllm.requests] == ([REQUEST] if first.status == 200 else [])
    assert [seen.header(b"content-length") for seen in fake_vllm.requests] in ([b"38"], [])
    assert second is None or second.status == 404


@pytest.mark.parametrize("fields", UPGRADES)
async def test_a_wish_to_upgrade_is_ignored_and_changes_no_framing(
    fields: bytes, start_proxy: StartProxy, dial: Connect, fake_vllm: StrictVllm
) -> None:
    running = await start_proxy(capture={"sample_rate": 0.0})
    for sent in LEGAL:
        fake_vllm.requests.clear()
        client = await dial(running)

        client.say(upgrading(sent, fields) + upgrading(BEHIND, fields) + BEHIND)

        replies = [await client.hear() for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 404, 404], sent
        assert all(reply.interim == () for reply in replies)
        assert [seen.body for seen in fake_vllm.requests] == [REQUEST], sent
        names = {name for name, _ in fake_vllm.requests[0].headers}
        assert names.isdisjoint({b"upgrade", b"connection", b"http2-settings"})


def test_a_request_that_wishes_to_upgrade_reads_the_same_wherever_it_is_cut() -> None:
    for sent in (length(b" 38"), coding(b" chunked"), BEHIND):
        data = upgrading(sent, UPGRADES[0]) + BEHIND
        for cut in range(1, len(data)):
            parser = RequestParser(max_body_bytes=1000)
            parser.feed(data[:cut])
            parser.feed(data[cut:])

            body = b"" if sent is BEHIND else REQUEST
            read = [(one.head.method, one.body) for one in parser.ready]  # type: ignore[union-attr]
            assert read == [(b"POST", body), (b"POST", b"")], (sent, cut)
            assert not parser.begun


def test_many_wishes_to_upgrade_in_one_read_are_as_many_requests() -> None:
    parser = RequestParser(max_body_bytes=1000)

    parser.feed(upgrading(BEHIND, UPGRADES[1]) * 2_000)

    assert len(parser.ready) == 2_000
    assert not any(isinstance(one, Refusal) for one in parser.ready)


def test_a_wish_to_upgrade_lifts_no_limit() -> None:
    for sent, status in (
        (HEAD + b"Content-Length: 1001\r\n\r\n", 413),
        (CHUNKED + b"\r\n3e9\r\n" + bytes(1001), 413),
        (CHUNKED + b"\r\n1;" + b"x" * 70_000 + b"\r\n{", 400),
        (HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    ):
        parser = RequestParser(max_body_bytes=1000)
        parser.feed(upgrading(sent, UPGRADES[0]))

        [refusal] = parser.ready
        assert isinstance(refusal, Refusal)
        assert refusal.status == status, sent[:80]


def test_a_connection_that_closes_after_the_request_takes_nothing_behind_it() -> None:
    parser = RequestParser(max_body_bytes=1000)
    closing = b"Connection: close, upgrade\r\nUpgrade: h2c\r\n"

    parser.feed(upgrading(length(b" 38"), closing) + BEHIND)

    first = parser.ready.popleft()
    assert isinstance(first, ClientRequest)
    assert (first.body, first.head.keep_alive) == (REQUEST, False)
    assert all(isinstance(one, Refusal) for one in parser.ready)
