"""Replies that llhttp does not see give what it would have made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from sidecar.relay.reply_parser import (
    BrokenReplyError,
    ReplyHead,
    ReplyParser,
    ReplyReader,
    chunk_at,
)
from support.watched_parser import WatchedParser

OK = b"HTTP/1.1 200 OK\r\n"
KNOWN = OK + b"server: uvicorn\r\ncontent-length: %b\r\ncontent-type: application/json\r\n\r\n"
STREAM = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
EVIL = b"\r\n0\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n5\r\nabcde\r\n"
"""Inside a body it is a body."""


def known(body: bytes) -> bytes:
    return KNOWN % str(len(body)).encode() + body


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@dataclass
class Reader(ReplyReader):
    heads: list[Any] = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)

    def reply_head(self, head: ReplyHead) -> None:
        headers = head.headers
        kind = (headers.content_type, headers.chunked, headers.connection)
        line = (head.status, head.reason, head.content_length)
        self.heads.append((line, kind, tuple(headers.lines)))

    def reply_body(self, data: bytes) -> None:
        assert self.heads, "a body before its head"
        self.body.append(data)

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return False

    def batch_end(self, *, complete: bool, received_at: float) -> None: ...

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None: ...


def new_parser() -> tuple[ReplyParser, WatchedParser]:
    parser = ReplyParser()
    return parser, WatchedParser(parser)


def receive(parser: ReplyParser, data: bytes) -> None:
    """As `UpstreamConnection.data_received`."""
    if parser.whole_chunks(data):
        parser.unframe(data)
    else:
        parser.feed(data)


def reply(parser: ReplyParser, *pieces: bytes, head_only: bool = False) -> Reader:
    reader = Reader()
    parser.expect(reader, head_only=head_only)
    for piece in pieces:
        receive(parser, piece)
    return reader


# -- any replies, any cuts: as with neither short-cut


@dataclass(frozen=True)
class Sent:
    """One reply, as it is read."""

    pieces: tuple[bytes, ...]
    head_only: bool = False


def stands(parser: ReplyParser, reader: Reader) -> Any:
    """What is known behind one read."""
    ends = (parser.complete, parser.complete and parser.keep_alive, parser.ends_with_close)
    return (*ends, parser.nothing_came, tuple(reader.heads), b"".join(reader.body))


def history(replies: list[Sent], *, shortcuts: bool) -> list[Any]:
    """How all stood behind every read of one connection, up to its end."""
    parser = ReplyParser()
    steps: list[Any] = []
    for sent in replies:
        reader = Reader()
        parser.expect(reader, head_only=sent.head_only)
        for piece in sent.pieces:
            try:
                if shortcuts:
                    receive(parser, piece)
                else:
                    parser._remembered = None
                    parser.feed(piece)
            except BrokenReplyError as error:
                return [*steps, (tuple(reader.heads), b"".join(reader.body), str(error))]
            steps.append(stands(parser, reader))
            if parser.complete:
                break
        parser.forget()
        if not (parser.complete and parser.keep_alive):
            break
    return steps


HEADS = (
    *(KNOWN,) * 4,
    KNOWN.replace(b"uvicorn", b"other"),
    KNOWN.replace(b"content-length", b"Content-Length"),
    KNOWN.replace(b"200 OK", b"404 Not Found"),
    KNOWN.replace(b"200 OK", b"204 No Content"),
    KNOWN.replace(b"200 OK", b"304 Not Modified"),
    KNOWN.replace(b"server: uvicorn", b"connection: close"),
    KNOWN.replace(b"server: uvicorn", b"connection: keep-alive, server\r\nserver: 1"),
    KNOWN.replace(b"server: uvicorn", b"content-length: 2"),
    KNOWN.replace(b"server: uvicorn", b"transfer-encoding: chunked"),
    KNOWN.replace(b"HTTP/1.1", b"HTTP/1.0"),
    KNOWN.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"server: uvicorn", b"connection: keep-alive"),
    OK + b"server: no length\r\n\r\n",
)
LENGTHS = (*(b"%d",) * 12, b"0%d", b"%d ", b" %d", b"+%d", b"%d1", b"0000000000000000%d", b"")
STREAM_HEADS: tuple[bytes, ...] = (*(STREAM,) * 3, STREAM.replace(b"text/", b"x/"))
STREAM_HEADS += (STREAM.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),)
SIZES = (1, 1, 2, 5, 15, 16, 17, 255, 256, 2040, 2042, 4095, 4096)
SPELLINGS: tuple[bytes, ...] = (
    *(b"%x",) * 12,
    b"%X",
    b"%X",
    b"0%x",
    b"0000000%x",
    b"0000000000%x",
    b"%x;a=b",
)
SPELLINGS += (b"%x;", b"0x%x", b"+%x", b" %x", b"%x ", b"\t%x", b"%x_0", b"-%x", b"", b"\n%x")
CHUNK_ENDS = (*(b"\r\n",) * 20, b"", b"\n", b"\r", b"ab", b"a\r\n", b"\r\n\r\n")
ENDS: tuple[bytes, ...] = (
    *(LAST,) * 4,
    b"000" + LAST,
    b"0;a=b\r\n\r\n",
    b"0\r\nx-t: 1\r\nconnection: close\r\n\r\n",
)
ENDS += (b"", b"0\r\n", b"rubbish\r\n")
INTERIM = (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
BEHIND = (*(b"",) * 5, b"x", b"abc\r\n", known(b"ab"), b"\r\n" + known(b"ab"), STREAM + LAST)


def spelled(spelling: bytes, body: bytes) -> bytes:
    size = b"%X" if b"%X" in spelling else b"%x"
    return spelling.replace(size, size % len(body)) + b"\r\n" + body


@st.composite
def units(draw: st.DrawFn) -> list[bytes]:
    """One reply: its head, and what its body is written in."""
    interim = [draw(st.sampled_from(INTERIM))] if not draw(st.integers(0, 9)) else []
    if draw(st.booleans()):
        body = draw(st.sampled_from([b"", b"{}", EVIL, b"x" * 300]))
        length = draw(st.sampled_from(LENGTHS)).replace(b"%d", b"%d" % len(body))
        head = draw(st.sampled_from(HEADS)).replace(b"%b", length)
        return [*interim, head, body, draw(st.sampled_from(BEHIND))]
    chunks = [
        spelled(spelling, (EVIL * (size // len(EVIL) + 1))[start : start + size]) + end
        for size, start, spelling, end in draw(
            st.lists(
                st.tuples(
                    st.sampled_from(SIZES),
                    st.sampled_from((0, 2, 5)),
                    st.sampled_from(SPELLINGS),
                    st.sampled_from(CHUNK_ENDS),
                ),
                max_size=6,
            )
        )
    ]
    head, end = draw(st.sampled_from(STREAM_HEADS)), draw(st.sampled_from(ENDS))
    return [*interim, head, *chunks, end, draw(st.sampled_from(BEHIND))]


@st.composite
def sent_replies(draw: st.DrawFn) -> Sent:
    """Most reads are whole units; the cuts are anywhere."""
    parts = draw(units())
    cuts, size = {0}, 0
    for part in parts:
        size += len(part)
        if draw(st.integers(0, 4)):
            cuts.add(size)
    cuts.update(draw(st.lists(st.integers(0, size), max_size=3)))
    joined = b"".join(parts)
    pieces = [joined[a:b] for a, b in pairwise([*sorted(cuts), size]) if a < b]
    return Sent(tuple(pieces), head_only=not draw(st.integers(0, 9)))


def alone(*pieces: bytes) -> list[Sent]:
    return [Sent(pieces)]


@settings(max_examples=150)
@given(st.lists(sent_replies(), min_size=1, max_size=4))
@example([Sent((known(b"ab"),)), Sent((known(b"abc"),)), Sent((KNOWN % b"2", b"a", b"bc"))])
@example([Sent((known(b"ab"),)), Sent((known(b""),)), Sent((known(b"ab") + b"x",))])
@example([Sent((known(b"ab"),)), Sent((KNOWN % b"9",), head_only=True), Sent((known(b"a"),))])
@example([Sent((known(b"ab"),)), Sent((INTERIM[0], known(b"a"))), Sent((known(b"a"),))])
@example([Sent((known(b"ab"),)), Sent((STREAM, chunk(b"a"), LAST)), Sent((known(b"a"),))])
@example(alone(STREAM, chunk(b"a"), chunk(b"b") + b"c", b"\r\nb\r\n"))
@example(alone(STREAM, chunk(b"a") + b"1", b"\r\nb\r\n", LAST))
@example(alone(STREAM, b"1\r\n", b"1\r\n", b"\r\n", b"1\r", b"\na\r", b"\n", LAST))
@example(alone(STREAM, chunk(b"a" * 16) + chunk(b"b" * 15), b"10\r\n" + b"c" * 16, b"\r\n", LAST))
def test_with_the_short_cuts_every_read_gives_the_same(replies: list[Sent]) -> None:
    assert history(replies, shortcuts=True) == history(replies, shortcuts=False)


# -- replies of a known length


def test_the_second_like_reply_is_not_parsed() -> None:
    parser, llhttp = new_parser()
    first = reply(parser, known(b"ab"))

    second = reply(parser, known(b"0123456789"))

    assert llhttp.fed == [known(b"ab")]
    assert second.body == [b"0123456789"]
    ((line, *same),) = second.heads
    assert line == (200, b"OK", 10)
    assert same == list(first.heads[0][1:])
    assert (parser.complete, parser.keep_alive, parser.nothing_came) == (True, True, False)


# -- streams


def in_stream(*pieces: bytes) -> tuple[ReplyParser, WatchedParser, Reader]:
    parser, llhttp = new_parser()
    reader = reply(parser, STREAM, *pieces)
    return parser, llhttp, reader


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 2040, 2041, 2048, 4096, 70_000])
def test_one_usual_chunk_is_recognised(size: int) -> None:
    _, llhttp, reader = in_stream(chunk(b"\r" * size), chunk(b"\n" * size))

    assert llhttp.fed == [STREAM]
    assert reader.body == [b"\r" * size, b"\n" * size]


@pytest.mark.parametrize("spelling", [b"%X", b"0%x", b"00000%x"])
def test_other_spellings_of_a_size_are_recognised(spelling: bytes) -> None:
    _, llhttp, reader = in_stream(spelled(spelling, b"x" * 171) + b"\r\n")

    assert llhttp.fed == [STREAM]
    assert reader.body == [b"x" * 171]


def test_no_read_of_any_length_is_taken_for_a_chunk_that_it_is_not() -> None:
    parser, _, _ = in_stream()

    for length in range(1, 2100):
        size = max(0, length - 4 - len(b"%x" % max(1, length - 5)))
        for wrong in (size - 1, size + 1):
            data = b"%x\r\n" % max(0, wrong)
            data += b"x" * (length - len(data) - 2) + b"\r\n"
            taken = parser.whole_chunks(data)
            start, end = chunk_at(data, 0)
            assert taken == (start > 0 and end + 2 == len(data)), data[:20]
