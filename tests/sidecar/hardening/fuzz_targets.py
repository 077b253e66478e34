"""What must hold of the parsers for any bytes; no test of its own, `fuzz_driver.py` runs it.

A target takes bytes and raises AssertionError when an invariant does not hold. Any other exception
is a defect too: none of these functions may raise what it does not name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import h11

from sidecar.relay.context import ClientRequest
from sidecar.relay.heads import SENT_ON_DEMAND, request_lines
from sidecar.relay.peek import RequestPeek, UnreadableBodyError, peek_request
from sidecar.relay.reply_edit import Strip, strip_event, strip_reply
from sidecar.relay.reply_parser import (
    BrokenReplyError,
    EventSplitter,
    ReplyHead,
    ReplyParser,
    ReplyReader,
    is_one_event,
)
from sidecar.relay.request_edit import PiecedBody, edit_request, members, splice_request
from sidecar.relay.request_parser import RequestParser
from sidecar.relay.surfaces import CHAT, COMPLETIONS, MESSAGES
from sidecar.relay.usage import UsageMeter

MAX_BODY = 2048


class Source:
    """Choices drawn from bytes: the same bytes, the same choices. Zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, limit: int) -> int:
        return (self.byte() << 8 | self.byte()) % limit

    def rest(self) -> bytes:
        return self._data[self._at :]


def cut(source: Source, data: bytes) -> list[bytes]:
    """`data` in 1 to 8 pieces."""
    places = sorted(source.below(len(data) + 1) for _ in range(source.byte() % 8))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


# -- requests


def requests_of(pieces: list[bytes]) -> list[Any]:
    parser = RequestParser(max_body_bytes=MAX_BODY)
    found: list[Any] = []
    for piece in pieces:
        parser.feed(piece)
        while parser.ready:
            item = parser.ready.popleft()
            found.append(parts(item) if isinstance(item, ClientRequest) else "refused")
    return found


def parts(request: ClientRequest) -> dict[str, Any]:
    """All that the relay knows of a request, to be compared."""
    head = request.head
    return {
        "line": (head.method, head.target, head.http_1_1, head.keep_alive),
        "lines": tuple(head.headers.lines),
        "aside": head.headers.aside,
        "body": request.body,
    }


def request_parser(data: bytes) -> None:
    """The cuts do not matter, nothing comes after a refusal, and what the relay would write of a
    request is read by a strict server, and by the relay itself, as that request."""
    source = Source(data)
    pieces = cut(source, source.rest()[16:])
    whole = requests_of([b"".join(pieces)])
    assert requests_of(pieces) == whole
    assert "refused" not in whole[:-1]
    for item in whole:
        if item != "refused" and item["line"][1].startswith(b"/"):
            check_written(item)


def check_written(request: dict[str, Any]) -> None:
    method, target, _, _ = request["line"]
    lines = request_lines(
        method,
        target,
        request["lines"],
        host=b"vllm:1",
        sent_on_demand=[
            b"%b: %b" % (name, request["aside"][name])
            for name in SENT_ON_DEMAND
            if name in request["aside"]
        ],
    )
    head = b"%b\r\nContent-Length: %d\r\n\r\n" % (lines, len(request["body"]))
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    server.receive_data(head + request["body"])
    body = b""
    while True:
        event = server.next_event()
        if isinstance(event, h11.Request):
            assert (bytes(event.method), bytes(event.target)) == (method, target)
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            raise AssertionError(f"{event} in {head!r}")
    assert body == request["body"]
    assert server.trailing_data == (b"", False)
    again = requests_of([head + body])
    assert [(item["line"][:2], item["body"]) for item in again] == [((method, target), body)]


# -- replies


class Reader(ReplyReader):
    def __init__(self) -> None:
        self.heads: list[ReplyHead] = []
        self.body = b""

    def reply_head(self, head: ReplyHead) -> None:
        self.heads.append(head)

    def reply_body(self, data: bytes) -> None:
        assert self.heads, "a body before its head"
        self.body += data

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return False

    def batch_end(self, *, complete: bool, received_at: float) -> None: ...

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None: ...


def reply_of(pieces: list[bytes], *, head_only: bool) -> tuple[Any, ...]:
    reader = Reader()
    parser = ReplyParser()
    parser.expect(reader, head_only=head_only)
    for piece in pieces:
        if parser.complete:  # the connection is given back; what follows closes it
            break
        try:
            parser.feed(piece)
        except BrokenReplyError:
            return "broken", said(reader.heads), reader.body
    assert len(reader.heads) <= 1
    if parser.complete:
        assert reader.heads, "complete without a head"
    return parser.complete, said(reader.heads), reader.body


def said(heads: list[ReplyHead]) -> list[tuple[Any, ...]]:
    return [(one.status, one.reason, one.headers.lines, one.content_length) for one in heads]


def reply_parser(data: bytes) -> None:
    """The cuts do not matter, there is one head, and no body is longer than its length says."""
    source = Source(data)
    head_only = source.byte() % 4 == 0
    pieces = [piece for piece in cut(source, source.rest()[16:]) if piece]
    whole = reply_of([b"".join(pieces)], head_only=head_only)
    assert reply_of(pieces, head_only=head_only) == whole
    complete, heads, body = whole
    if heads and heads[0][3] is not None and complete is True and not head_only:
        assert len(body) == (0 if heads[0][0] in (204, 304) else heads[0][3])
    if head_only:
        assert body == b""


# -- JSON, made of choices: random bytes are almost never JSON

KEYS: tuple[str, ...] = (
    "model",
    "choices",
    "token_ids",
    "logprobs",
    "prompt_token_ids",
    "delta",
    "message",
    "a",
)
KEYS += ("finish_reason", "return_token_ids", "messages", "user", "stream", "usage", "", "é😀")
KEYS += ('"\\', "stream_options", "total_tokens", "echo", "prompt")
SPACES = ("", "", "", " ", "\n", "\t \r\n")
SCALARS: tuple[str, ...] = (
    "null",
    "true",
    "0",
    "-1.5e+10",
    "1E400",
    '""',
    '"}]"',
    '"\\u0000\\ud800"',
    '"\\\\"',
)
SCALARS += ('"é😀"', "[]", "{}", "NaN", "-Infinity", '"a\\"b"', "123456789012345678901234567890")


def space(source: Source, *, between_lines: bool) -> str:
    chosen = SPACES[source.byte() % len(SPACES)]
    return chosen if between_lines else chosen.replace("\n", "").replace("\r", "")


@dataclass(frozen=True, slots=True)
class Form:
    """How a document is written."""

    lines: bool = True
    """White space may be a line break."""
    plain: bool = False
    """As vLLM writes: nothing before a colon, no letter escaped that need not be, and no name twice
    in one object."""
    reply: bool = False
    """It begins with choices."""


def key(source: Source, form: Form, preferred: str | None) -> str:
    name = preferred or KEYS[source.byte() % len(KEYS)]
    escaped = json.dumps(name, ensure_ascii=source.byte() % 2 == 0)
    if not form.plain and source.byte() % 16 == 0 and name.isascii() and name.isalnum():
        return '"' + "".join(f"\\u{ord(letter):04x}" for letter in name) + '"'
    return escaped


def value(source: Source, depth: int, form: Form) -> str:
    kind = source.byte() % 8
    if depth <= 0 or kind < 4:
        return SCALARS[source.byte() % len(SCALARS)]
    if kind < 6:
        return members_of(source, depth - 1, form)
    items = [value(source, depth - 1, form) for _ in range(source.byte() % 4)]
    gap = space(source, between_lines=form.lines)
    return f"[{gap}{f'{gap},{gap}'.join(items)}{gap}]"


def members_of(source: Source, depth: int, form: Form) -> str:
    found: dict[str, str] = {}
    inner = replace(form, reply=False)
    for number in range(source.byte() % 6):
        gap = space(source, between_lines=form.lines)
        preferred = "choices" if form.reply and number == 0 else None
        name = key(source, form, preferred)
        if preferred and source.byte() % 4:
            count = source.byte() % 3
            choices = [members_of(source, depth - 1, inner) for _ in range(count)]
            item = f"[{','.join(choices)}]"
        else:
            item = value(source, depth, inner)
        before = "" if form.plain else gap
        member = f"{gap}{name}{before}:{gap}{item}{gap}"
        found[json.loads(name) if form.plain else str(number)] = member
    return "{" + ",".join(found.values()) + "}"


OWN_OF_A_CHOICE = ("token_ids", "prompt_token_ids", "logprobs")


class Pairs(list[tuple[str, Any]]):
    """An object with its members in order, those that come twice included."""


def load(text: str | bytes) -> Any:
    return json.loads(text, object_pairs_hook=Pairs, parse_int=str, parse_float=str)


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)  # NaN is not equal to itself; its spelling is


def blanked(document: Any) -> Any:
    """A reply without what the sidecar may take out of it."""
    if not isinstance(document, Pairs):
        return document
    found = Pairs()
    for name, item in document:
        if name == "prompt_token_ids":
            found.append((name, None))
        elif name == "choices" and isinstance(item, list) and not isinstance(item, Pairs):
            found.append((name, [blanked_choice(choice) for choice in item]))
        else:
            found.append((name, item))
    return found


def blanked_choice(choice: Any) -> Any:
    if not isinstance(choice, Pairs):
        return choice
    return Pairs((name, None if name in OWN_OF_A_CHOICE else item) for name, item in choice)


def written(source: Source, depth: int, form: Form) -> bytes:
    return members_of(source, depth, form).encode("utf-8", "surrogatepass")


def spans(data: bytes) -> None:
    """The members that are found are those that Python's json finds, at their very places."""
    document = written(Source(data), 4, Form())
    expected = load(document)
    found = members(document)
    assert [member.key for member in found] == [name for name, _ in expected]
    for member, (_, item) in zip(found, expected, strict=True):
        assert same(load(document[member.start : member.end]), item)


def a_strip(source: Source) -> Strip:
    ids, logprobs, usage = (source.byte() % 2 == 0 for _ in range(3))
    return Strip(token_ids=ids, logprobs=logprobs, usage=usage)


def strip_whole(data: bytes) -> None:
    """Nothing but the sidecar's own fields changes, and those become null, or nothing changes."""
    source = Source(data)
    strip = a_strip(source)
    document = written(source, 4, Form(plain=True, reply=True))
    check_stripped(document, strip_reply(document, strip), strip)


def check_stripped(before: bytes, after: bytes, strip: Strip) -> None:
    old, new = load(before), load(after)
    assert same(blanked(old), blanked(new))
    if strip.everything and after != before:
        assert same(new, blanked(new))
    if strip.nothing:
        assert after == before


def strip_stream(data: bytes) -> None:
    """The same for an event, however it is framed."""
    source = Source(data)
    strip = a_strip(source)
    document = written(source, 4, Form(lines=False, plain=True, reply=True))
    lead, end = framing(source)
    after = strip_event(lead + document + end, strip)
    if after:
        assert after.startswith(lead)
        assert after.endswith(end)
        check_stripped(document, after[len(lead) : len(after) - len(end)], strip)
    else:
        assert strip.everything or strip.usage


def framing(source: Source) -> tuple[bytes, bytes]:
    lead = (b"data: ", b"data:", b"data:\t ", b": ", b"event: x\ndata: ")[source.byte() % 5]
    return lead, (b"\n\n", b"\r\n\r\n", b"\n\r\n", b"")[source.byte() % 4]


def strip_odd(data: bytes) -> None:
    """However it is spelled, only the sidecar's own fields change; and any bytes may come in."""
    source = Source(data)
    strip = a_strip(source)
    lead, end = framing(source)
    whole = written(source, 4, Form(reply=True))
    check_stripped(whole, strip_reply(whole, strip), strip)
    line = written(source, 4, Form(lines=False, reply=True))
    after = strip_event(lead + line + end, strip)
    if after:
        check_stripped(line, after[len(lead) : len(after) - len(end)], strip)
    strip_event(source.rest(), strip)
    strip_reply(source.rest(), strip)


def edit(data: bytes) -> None:
    """What is set is set wherever it stands, and everything else stays as it is."""
    source = Source(data)
    document = written(source, 4, Form())
    wanted = {"model": b'"other"'}
    wanted |= {"return_token_ids": b"true"} if source.byte() % 2 else {}
    wanted |= {"logprobs": b"0"} if source.byte() % 2 else {}
    check_edited(document, edit_request(document, wanted), wanted)
    for body in (document, source.rest()):
        try:
            peek = peek_request(body)
        except UnreadableBodyError:
            continue  # answered with 400
        check_peek(peek)


def check_peek(peek: RequestPeek) -> None:
    """What is read of a body is there; the short way of editing gives what the long one does."""
    before = load(peek.body.decode("utf-8", "surrogatepass"))
    for surface in (CHAT, COMPLETIONS, MESSAGES):
        peek.may_ask_token_ids(surface.surface)
        peek.may_ask_logprobs(surface.surface)
    assert len(peek.opening({})[0]) in (0, 16)
    assert isinstance(peek.session_name(), str)
    assert isinstance(peek.agent_session(), str)
    assert isinstance(peek.user, str)
    assert (peek.model is None) or peek.model in [v for k, v in before if k == "model"]
    if peek.model_json is None or not peek.has_no_injected_fields:
        return
    new, front = b'"other"', b'"return_token_ids":true,"logprobs":true,'
    spliced = splice_request(peek.body, peek.model_json, new, front)
    if isinstance(spliced, PiecedBody):
        spliced = b"".join(spliced.pieces)
    if spliced is None or len([name for name, _ in before if name == "model"]) > 1:
        return
    wanted = {"return_token_ids": b"true", "logprobs": b"true", "model": new}
    check_edited(peek.body, spliced, wanted)


def check_edited(before: bytes, after: bytes, wanted: dict[str, bytes]) -> None:
    old = load(before.decode("utf-8", "surrogatepass"))
    new = load(after.decode("utf-8", "surrogatepass"))
    found = {name: json.dumps(item) for name, item in new if name in wanted}
    assert found == {name: json.dumps(load(item)) for name, item in wanted.items()}
    kept = [pair for pair in new if pair[0] not in wanted]
    assert same(kept, [pair for pair in old if pair[0] not in wanted])


def usage(data: bytes) -> None:
    """Any reply is read for its usage, wherever it stands and wherever the reply is cut; neither
    text inside strings nor what stands deeper counts."""
    source = Source(data)
    document = written(source, 3, Form(lines=False))
    for reply in (
        b'{"usage":{"total_tokens":7},"a":%b}' % document,
        b'{"a":%b,"usage":{"total_tokens":7}}' % document,
    ):
        assert metered(*cut(source, reply)) == 7
        assert metered(b"data: %b\n\n" % reply) == 7
    metered(source.rest())
    inside = json.dumps({"text": '{"usage":{"total_tokens":9}}'}).encode()
    assert metered(inside) is None


def metered(*pieces: bytes) -> int | None:
    meter = UsageMeter()
    for piece in pieces:
        meter.feed(piece)
    return meter.told


def split_events(data: bytes) -> None:
    """All events and the rest are the bytes that were fed, and every event is a whole one."""
    source = Source(data)
    pieces = cut(source, source.rest()[16:])
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert b"".join(events) + splitter.rest() == b"".join(pieces)
    assert all(event.endswith((b"\n\n", b"\n\r\n")) for event in events)
    whole = EventSplitter()
    assert whole.feed(b"".join(pieces)) == events
    for event in events:
        assert is_one_event(event) or b"\r" in event
    assert not is_one_event(b"".join(pieces)) or len(events) == 1


TARGETS: dict[str, Callable[[bytes], None]] = {
    "request_parser": request_parser,
    "reply_parser": reply_parser,
    "spans": spans,
    "strip_whole": strip_whole,
    "strip_stream": strip_stream,
    "strip_odd": strip_odd,
    "edit": edit,
    "usage": usage,
    "split_events": split_events,
}

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
PAD = b"\x03" * 18
"""Read as cuts by `cut`, and skipped by it."""
SEEDS: dict[str, tuple[bytes, ...]] = {
    "request_parser": tuple(
        PAD + text
        for text in (
            POST + b"Content-Length: 2\r\n\r\n{}",
            POST + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nT: 1\r\n\r\n",
            (POST + b"Content-Length: 2\r\n\r\n{}") * 3,
            POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
            POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}",
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nCONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"HEAD /v1/models HTTP/1.0\r\n\r\n",
        )
    ),
    "reply_parser": tuple(
        b"\x01" + PAD + text
        for text in (
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nX: 1\r\n\r\nHTTP/1.0 200 OK\r\n\r\nabc",
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
        )
    ),
    "split_events": (PAD + b"data: 1\n\n: ping\r\n\r\ndata: [DONE]\n\r\n",),
}
