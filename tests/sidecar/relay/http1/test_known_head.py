"""A head that comes again is recognised, and what is made of it is what llhttp would have made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from sidecar.relay.context import ClientRequest
from sidecar.relay.heads import GIVE_UP_AFTER, MAX_HEAD_BYTES, HeadMemory, KnownHead
from sidecar.relay.refusals import Refusal
from sidecar.relay.request_parser import RequestParser
from support.watched_parser import WatchedParser

MAX_BODY = 64
LINE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
USUAL = LINE + b"X-A: 1\r\nContent-Length: %b\r\nX-B: 2\r\n\r\n"


def usual(body: bytes) -> bytes:
    return USUAL % str(len(body)).encode() + body


def new_parser() -> tuple[RequestParser, WatchedParser]:
    parser = RequestParser(max_body_bytes=MAX_BODY)
    return parser, WatchedParser(parser)


def feed(parser: RequestParser, *pieces: bytes) -> list[Any]:
    """What the pieces gave: bodies, and refusals."""
    for piece in pieces:
        parser.feed(piece)
    found = [item.body if isinstance(item, ClientRequest) else item for item in parser.ready]
    parser.ready.clear()
    return found


# -- any requests, any cuts: as without a memory


def told(item: ClientRequest | Refusal) -> Any:
    """All that the relay knows of a request. (The length is that of the body: nobody reads the
    header again.)"""
    if isinstance(item, Refusal):
        return item
    head = item.head
    aside = {name: value for name, value in head.headers.aside.items() if name != b"content-length"}
    line = (head.method, head.target, head.http_1_1, head.keep_alive, head.head_only)
    return (line, tuple(head.headers.lines), aside, item.body)


def history(pieces: Iterable[bytes], *, remembers: bool) -> list[Any]:
    """What every piece gave, and how the parser stood behind it."""
    parser = RequestParser(max_body_bytes=MAX_BODY)
    steps: list[Any] = []
    refused = False
    for piece in pieces:
        if not remembers:
            parser._remembered = None
        parser.feed(piece)
        items = [told(item) for item in parser.ready]
        parser.ready.clear()
        refused = refused or any(isinstance(item, Refusal) for item in items)
        head = None if parser.head is None else parser.head.target
        stands = (parser.begun, parser.in_body, parser.body_bytes, parser.wants_continue, head)
        steps.append((items, None if refused else stands))
    return steps


PLAIN = (
    *(USUAL,) * 6,
    USUAL.replace(b"X-A: 1", b"X-A: 2"),
    USUAL.replace(b"X-A: 1", b"X-A: 1\r\nX-Sidecar-Session: 1\r\nAuthorization: Bearer k"),
    USUAL.replace(b"Content-Length", b"content-length"),
    USUAL.replace(b"Content-Length", b"CONTENT-LENGTH"),
    USUAL.replace(b"X-B: 2", b"X-B: 2\r\nContent-Length: 3"),
    USUAL.replace(b"X-B: 2", b"X-Content-Length: 3"),
    USUAL.replace(b"X-A: 1", b"Expect: 100-continue"),
    USUAL.replace(b"X-A: 1", b"Connection: close"),
    USUAL.replace(b"X-A: 1", b"Connection: keep-alive, X-B"),
    USUAL.replace(b"X-A: 1", b"Connection: Upgrade\r\nUpgrade: h2c"),
    USUAL.replace(b"X-A: 1", b"Transfer-Encoding: chunked"),
    USUAL.replace(b"HTTP/1.1", b"HTTP/1.0"),
    USUAL.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"X-A: 1", b"Connection: keep-alive"),
    USUAL.replace(b"POST", b"GET"),
    USUAL.replace(b"POST", b"HEAD"),
    b"\r\n" + USUAL,
)
OTHERS = (
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"\r\n",
    b"rubbish",
)
LENGTHS: tuple[bytes, ...] = (
    *(b"%d",) * 10,
    b"0%d",
    b"000000000000000000%d",
    b"+%d",
    b" %d",
    b"%d ",
    b"%d,%d",
    b"%d1",
)
LENGTHS += (b"1_%d", b"0x%d", b"99999999999999999999", b"65", b"999999999999999", b"-%d", b"")
BODIES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"", b"{}", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"0\r\n\r\n"]),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 5)) == 5:
        return draw(st.sampled_from(OTHERS))
    body, length = draw(BODIES), draw(st.sampled_from(LENGTHS))
    said = length.replace(b"%d", b"%d" % len(body))
    return draw(st.sampled_from(PLAIN)).replace(b"%b", said) + body


@st.composite
def reads(draw: st.DrawFn) -> list[bytes]:
    """A few requests. Most reads begin with one; the cuts are anywhere."""
    sent = draw(st.lists(requests(), min_size=1, max_size=6))
    cuts, size = {0}, 0
    for one in sent:
        size += len(one)
        if draw(st.integers(0, 4)):
            cuts.add(size)
        if draw(st.booleans()):
            cuts.add(size - len(one) + max(0, one.find(b"\r\n\r\n")) + 4)
    cuts.update(draw(st.lists(st.integers(0, size), max_size=3)))
    joined = b"".join(sent)
    return [joined[a:b] for a, b in pairwise([*sorted(cuts), size]) if a < b]


@settings(max_examples=150)
@given(reads())
@example([usual(b"ab"), usual(b"abc"), usual(b""), usual(b"x" * 65)])
@example([usual(b"ab"), usual(b"ab") + usual(b"abc")[:-1], b"c" + usual(b"")])
@example([usual(b"ab"), USUAL % b"3", b"abc" + usual(b"abcd"), usual(b"x")])
@example([usual(b"ab"), USUAL % b"+2" + b"ab", usual(b"ab")])
@example([usual(b"ab"), USUAL % b"" + b"ab"])
@example([b"\r", b"\n" + usual(b"ab"), b"\n" + usual(b"ab"), b"\n", usual(b"ab")])
def test_with_a_memory_the_same_requests_are_read_and_the_same_are_refused(
    pieces: list[bytes],
) -> None:
    assert history(pieces, remembers=True) == history(pieces, remembers=False)


@pytest.mark.parametrize("head", PLAIN, ids=range(len(PLAIN)))
def test_a_head_means_the_same_the_second_and_the_third_time(head: bytes) -> None:
    sent = [head.replace(b"%b", b"%d" % len(body)) + body for body in (b"ab", b"", b"abcdefghij")]

    assert history(sent, remembers=True) == history(sent, remembers=False)


# -- what is recognised


def test_the_second_like_request_is_not_parsed() -> None:
    parser, llhttp = new_parser()

    assert feed(parser, usual(b"ab"), usual(b"0123456789"), usual(b"")) == [
        b"ab",
        b"0123456789",
        b"",
    ]

    assert llhttp.fed == [usual(b"ab")]


def test_head_and_body_may_come_in_reads_of_their_own() -> None:
    parser, llhttp = new_parser()
    assert feed(parser, USUAL % b"2", b"ab") == [b"ab"]

    assert feed(parser, USUAL % b"5") == []
    assert (parser.begun, parser.in_body, parser.body_bytes) == (True, True, 0)
    assert parser.head is not None
    assert feed(parser, b"ab", b"c") == []
    assert (parser.begun, parser.in_body, parser.body_bytes) == (True, True, 3)
    assert feed(parser, b"de") == [b"abcde"]
    assert (parser.begun, parser.in_body, parser.body_bytes) == (False, False, 0)
    assert parser.head is None

    assert llhttp.fed == [USUAL % b"2", b"ab"]


def test_a_changed_byte_anywhere_in_the_head_goes_to_llhttp() -> None:
    sent = usual(b"ab")
    digit = sent.index(b"2\r\nX-B")
    for at in {*range(len(sent) - len(b"ab"))} - {digit}:
        parser, llhttp = new_parser()
        changed = sent[:at] + b"3" + sent[at + 1 :]
        feed(parser, sent, changed)
        assert llhttp.fed == [sent, changed], at


# -- what is remembered, and for how long


def numbered(number: int) -> bytes:
    return LINE + b"X-Number: %d\r\nContent-Length: 2\r\n\r\nab" % number


def test_a_peer_that_writes_something_new_into_each_head_is_given_up() -> None:
    parser, llhttp = new_parser()
    sent = [numbered(number) for number in range(GIVE_UP_AFTER + 1)]

    feed(parser, *sent, sent[-1], sent[-1])

    assert llhttp.fed == [*sent, sent[-1], sent[-1]]


def test_a_head_that_comes_again_in_time_begins_the_count_anew() -> None:
    parser, llhttp = new_parser()
    sent = [numbered(number) for number in range(3 * GIVE_UP_AFTER)]
    rounds = [sent[at : at + GIVE_UP_AFTER] for at in range(0, len(sent), GIVE_UP_AFTER)]

    for one in rounds:
        feed(parser, *one, one[-1])

    assert llhttp.fed == sent


@pytest.mark.parametrize(("size", "remembered"), [(MAX_HEAD_BYTES, True), (8193, False)])
def test_a_long_head_is_not_remembered(size: int, remembered: bool) -> None:
    head = LINE + b"X: %b\r\nContent-Length: 2\r\n\r\n"
    sent = head % (b"x" * (size - len(head) + 2)) + b"ab"
    parser, llhttp = new_parser()

    feed(parser, sent, sent)

    assert len(sent) == size + 2
    assert llhttp.fed == ([sent] if remembered else [sent, sent])


def test_only_the_last_head_is_remembered() -> None:
    parser, llhttp = new_parser()
    chunked = LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"

    feed(parser, usual(b"a"), chunked, usual(b"a"), numbered(1), usual(b"a"))

    assert llhttp.fed == [usual(b"a"), chunked, usual(b"a"), numbered(1), usual(b"a")]


# -- the bytes


@pytest.mark.parametrize(
    ("digits", "length"),
    [(b"0", 0), (b"7", 7), (b"007", 7), (b"120", 120), (b"999999999999999", 999_999_999_999_999)],
)
def test_a_length_is_up_to_fifteen_digits(digits: bytes, length: int) -> None:
    known = KnownHead(b"a: ", b"\r\n\r\n")

    assert known.match(b"a: " + digits + b"\r\n\r\nbody") == len(digits) + 7
    assert known.length == length


@pytest.mark.parametrize(
    "digits",
    [
        *(b"", b"+5", b"-5", b" 5", b"5 ", b"\t5", b"0x5", b"1_0", b"5,5", b"5.0", b"1e3", b"a"),
        *(b"/", b":", b"\xd9\xa5", b"\xb2", b"0" * 16, b"1" * 16, b"5\n", b"5\x00"),
    ],
)
def test_nothing_else_is(digits: bytes) -> None:
    known = KnownHead(b"a: ", b"\r\n\r\n")

    assert known.match(b"a: " + digits + b"\r\n\r\nbody") == -1


def test_a_head_is_recognised_when_all_of_it_is_there() -> None:
    known, head = KnownHead(b"a: ", b"\r\n\r\n"), b"a: 12\r\n\r\n"

    assert [known.match(head[:size]) for size in range(len(head))] == [-1] * len(head)
    assert known.match(head) == len(head)


@pytest.mark.parametrize("body_length", [1, 3, 0])
def test_a_body_of_another_length_than_announced_teaches_nothing(body_length: int) -> None:
    memory = HeadMemory()
    assert memory.learn(usual(b"ab"), 2)

    assert not memory.learn(usual(b"ab"), body_length)

    assert memory.match(usual(b"ab")) == -1
