"""What a JSON reader refuses is answered, or passed on, counted and logged; nothing breaks."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from structlog.testing import capture_logs

from sidecar.capture.assemble import assemble
from sidecar.records import Assignment, RawCapture, Surface, Timings, encode_exchange
from sidecar.relay.best_of import plan_best_of
from sidecar.relay.heads import RequestHeaders
from sidecar.relay.plan import Plan, RequestContext, plan_request
from sidecar.relay.refusals import names_unknown_model
from sidecar.relay.reply_edit import STRIP_USUAL, strip_event, strip_reply
from sidecar.relay.surfaces import BY_PATH
from sidecar.routing.assignment import CompiledRouting
from sidecar.routing.table import RoutingTable
from support.fake_vllm import FakeVllm
from support.proxy_kit import Running, StartProxy, Wire

MODEL = "smollm2-135m"
PATHS = [path.decode() for path in BY_PATH]
LONG = 300_000
"""Length of a long body, in bytes: over 64 KiB, so that it is sent on in pieces."""
PARSING = b'{"detail":"There was an error parsing the body"}'
"""What vLLM 0.32 answers when Python's json raises another error than that of wrong syntax."""


def nested(depth: int, opens: bytes = b"[", closes: bytes = b"]") -> bytes:
    return opens * depth + b"1" + closes * depth


DEPTHS = [*range(sys.getrecursionlimit() - 150, sys.getrecursionlimit() + 10, 31), 20_000]
"""Around where one reader or another gives up, wherever it stands in the stack, and far beyond."""
REFUSED = {
    "arrays": (nested(20_000), "nested_too_deep"),
    "objects": (nested(20_000, b'{"a":', b"}"), "nested_too_deep"),
    "bytes of no text": (b'"\xff\xfe"', "not_text"),
    "integer": (b"1" * 5000, "number_too_long"),
    "negative integer": (b"-" + b"1" * 5000, "number_too_long"),
}
LEFT_TO_VLLM = {
    "half a pair": b'"\\ud800"',
    "half a pair as bytes": b'"\xed\xa0\x80"',
    "not a number": b"NaN",
    "infinity": b"-Infinity",
    "a float of many digits": b"1" * 5000 + b".0",
    "an integer of as many digits as may be": b"1" * 4300,
}
MEMBERS = ("model", "user", "stream", "stream_options", "messages", "metadata", "input", "x")


def body_with(value: bytes, *, size: int = 0, more: bytes = b"NaN") -> bytes:
    """A request with `value` in it. more: what msgspec refuses, so that Python's json reads it."""
    padding = b"p" * size
    return (
        b'{"model":"%b","messages":[{"role":"user","content":"hi"}],"input":"hi","prompt":"hi",'
        b'"max_tokens":5,"z":%b,"padding":"%b","x":%b}'
    ) % (MODEL.encode(), more, padding, value)


class Connection:
    """One client that stays."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, sent: bytes) -> tuple[bytes, bytes]:
        """Returns: the head and the body of the reply."""
        head_end = sent.index(b"\r\n\r\n") + 4
        self.writer.write(sent[: head_end + 10])
        await asyncio.sleep(0)
        for at in range(head_end + 10, len(sent), 100_000):
            self.writer.write(sent[at : at + 100_000])
            await self.writer.drain()
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            return head, await self.reader.readexactly(length)


@pytest.fixture
async def connect() -> Any:
    opened: list[Connection] = []

    async def connect(running: Running) -> Connection:
        opened.append(Connection(*await asyncio.open_connection("127.0.0.1", running.port)))
        return opened[-1]

    yield connect
    for one in opened:
        one.writer.transport.abort()


@pytest.mark.parametrize(("path", "size"), [(PATHS[0], 0), (PATHS[0], LONG), (PATHS[3], LONG)])
async def test_a_body_that_no_reader_takes_is_answered_as_vllm_does_counted_and_logged_once(
    path: str, size: int, connect: Any, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    client = await connect(running)
    context = running.proxy._relay._context
    context.rate_limited_log._clock = lambda: 0.0
    bodies = [(body_with(value, size=size), reason) for value, reason in REFUSED.values()]
    # Only this one is read by msgspec alone.
    bodies.append((body_with(nested(20_000), size=size, more=b"0"), "nested_too_deep"))

    with capture_logs() as logs:
        for sent_body, reason in bodies:
            before = running.metric("sidecar_bodies_unreadable_total", reason=reason)
            sent = wire.post(sent_body, path=path, close=False)

            head, body = await client.ask(sent)

            assert (head[:12], body) == (b"HTTP/1.1 400", PARSING)
            assert b"connection: close" not in head.lower()
            now = running.metric("sidecar_bodies_unreadable_total", reason=reason)
            assert now == before + 1

    told = [item for item in logs if item["event"] == "body_unreadable"]
    assert len(told) == 1
    assert told[0]["reason"] == "nested_too_deep"
    assert fake_vllm.requests == []
    assert running.metric("sidecar_requests_total", status="400") == len(bodies)
    assert running.metric("sidecar_requests_in_flight") == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not_json"),
        (b"", "not_an_object"),
        (b"[]", "not_an_object"),
        (b"NaN", "not_an_object"),
    ],
)
async def test_a_body_of_other_faults_is_counted_by_its_reason(
    body: bytes, reason: str, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    assert (await running.send(wire.post(body))).startswith(b"HTTP/1.1 400")

    assert running.metric("sidecar_bodies_unreadable_total", reason=reason) == 1


@pytest.mark.parametrize(("path", "size"), [(one, LONG) for one in PATHS[:4]] + [(PATHS[0], 0)])
async def test_what_vllm_reads_goes_on_to_it_whatever_a_stricter_reader_thinks(
    path: str, size: int, connect: Any, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    client = await connect(running)

    for value in LEFT_TO_VLLM.values():
        sent = body_with(value, size=size)
        head, _ = await client.ask(wire.post(sent, path=path, close=False))

        assert head.startswith(b"HTTP/1.1 200")
        assert fake_vllm.requests[-1].body.endswith(sent[sent.index(b'"messages"') :])

    # What was asked for can be stored: nothing is lost for its odd text.
    await running.captured(len(LEFT_TO_VLLM))
    assert running.metric("sidecar_captures_kept_total") == len(LEFT_TO_VLLM)


async def test_a_user_of_half_a_pair_is_recorded(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    await running.send(wire.post(body_with(b'1,"user":"\\ud800-\xc3\xa9"')))

    assert (await running.captured(1))[0].user == "?-\u00e9"


# -- every reader of a body, at every depth

TABLE = CompiledRouting(RoutingTable(model=MODEL, champion=f"{MODEL}--v1", generation=1))


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("more", [b"1", b"NaN"])
def test_no_part_of_the_plan_fails_on_any_value_at_any_depth(member: str, more: bytes) -> None:
    values = [
        *(value for value, _ in REFUSED.values()),
        *LEFT_TO_VLLM.values(),
        *map(nested, DEPTHS),
        *(nested(depth, b'{"include_usage":', b"}") for depth in DEPTHS),
        *(b'[{"role":"user","content":%b}]' % nested(depth) for depth in DEPTHS),
        *(b'{"include_usage":false,"user_id":%b}' % value for value in LEFT_TO_VLLM.values()),
    ]
    bodies = [
        body
        for value in values
        for body in (
            b'{"%b":%b,"stream":true,"z":%b}' % (member.encode(), value, more),
            b'{"model":"%b","z":%b,"%b":%b,"stream":true}'
            % (MODEL.encode(), more, member.encode(), value),
        )
    ]
    for rule in BY_PATH.values():
        for body in bodies:
            around = RequestContext(TABLE, None, metered=True)
            plan = plan_request(rule, body, RequestHeaders(), around)
            if not isinstance(plan, Plan):
                assert plan.status in (400, 404)
                continue
            sent = plan.body_for(plan.routes[0], plan.strip)
            assert isinstance(sent, bytes)
            if plan.strip.usage:
                asked = b'"include_usage":true' in sent.replace(b" ", b"")
                assert asked or sent == body, "a model that is none is left to vLLM to refuse"
            plan_best_of(plan.peek, 4, captured=True)
            plan.user.encode()


# -- replies


def edited(reply: bytes) -> bytes:
    for name in (b"token_ids", b"prompt_token_ids", b"logprobs"):
        reply = reply.replace(b'"%b":[1]' % name, b'"%b":null' % name)
    return reply


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("place", ["top", "choice", "message", "logprobs"])
def test_a_reply_nested_too_deep_is_edited_all_the_same(depth: int, place: str) -> None:
    deep = dict.fromkeys(("top", "choice", "message", "logprobs"), b"0")
    deep[place] = nested(depth, b'{"token_ids":', b"}")
    body = (
        b'{"x":%b,"choices":[{"y":%b,"message":{"z":%b},"token_ids":[1],"logprobs":%b}],'
        b'"prompt_token_ids":[1]}'
    ) % (deep["top"], deep["choice"], deep["message"], b"[1]" if place != "logprobs" else b"%b")
    sent = body % deep["logprobs"] if place == "logprobs" else body
    expected = edited(body % b"null" if place == "logprobs" else body)

    assert strip_reply(sent, STRIP_USUAL) == expected
    assert strip_event(b"data: %b\n\n" % sent, STRIP_USUAL) == b"data: %b\n\n" % expected
    assert not names_unknown_model(sent)


REPLIES: dict[Surface, tuple[bytes, bytes]] = {
    "chat": (
        b'{"model":"m","x":%b,"choices":[{"index":0,"message":{"content":"a","z":%b},'
        b'"logprobs":%b}],"usage":%b}',
        b'data: {"model":"m","x":%b,"choices":[{"index":0,"delta":{"content":"a","z":%b},'
        b'"logprobs":%b}],"usage":%b}\n\ndata: [DONE]\n\n',
    ),
    "completions": (
        b'{"model":"m","x":%b,"choices":[{"text":"a","z":%b,"logprobs":%b}],"error":%b}',
        b'data: {"model":"m","x":%b,"choices":[{"text":"a","z":%b,"logprobs":%b}],"error":%b}\n\n',
    ),
    "responses": (
        b'{"model":"m","x":%b,"output":[{"type":"message","content":%b}],"usage":%b,"error":%b}',
        b'data: {"type":"response.completed","x":%b,"response":{"output":%b,"usage":%b,'
        b'"error":%b}}\n\n',
    ),
    "messages": (
        b'{"model":"m","x":%b,"content":[{"type":"tool_use","input":{"a":%b}}],"usage":%b,'
        b'"error":%b}',
        b'data: {"type":"message_start","x":%b,"message":{"content":[{"type":"tool_use",'
        b'"input":{"a":%b}}],"usage":%b,"error":%b}}\n\n',
    ),
}


@pytest.mark.parametrize("surface", REPLIES)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_odd_reply_is_kept_as_one_that_cannot_be_read(surface: Surface, streamed: bool) -> None:
    odd = [*map(nested, DEPTHS), *(nested(depth, b'{"a":', b"}") for depth in DEPTHS)]
    odd += [value for value, _ in REFUSED.values()] + [*LEFT_TO_VLLM.values()]
    for place in range(4):
        for value in odd:
            said = [b"null"] * 4
            said[place] = value
            reply = REPLIES[surface][streamed] % tuple(said)

            exchange = assemble(raw(surface, (reply,), streamed))

            assert encode_exchange(exchange)
            assert exchange.untrainable_reason is not None
            for choice in exchange.choices:
                json.loads(choice.message)


def raw(surface: Surface, reply: tuple[bytes, ...], streamed: bool) -> RawCapture:
    return RawCapture(
        exchange_id="ex_1",
        public_model="m",
        route=Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model="m"),
        replica="http://vllm",
        session_key="h:s",
        user="",
        request=b"{}",
        reply=reply,
        streamed=streamed,
        status=200,
        outcome="ok",
        timings=Timings(started_at=1_000.0, first_byte_s=0.5, total_s=2.0),
        surface=surface,
    )


@pytest.mark.parametrize("path", PATHS[:4])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reply_nested_too_deep_reaches_its_client_and_is_recorded(
    path: str,
    streamed: bool,
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
) -> None:
    reply = b'{"choices":[{"index":0,"message":{"content":"a","z":%b},"token_ids":[1]}]}'
    body = reply % nested(20_000)
    event = b"data: %b\n\n" % body
    whole, stream = wire.whole_reply(body), [wire.STREAM_HEAD, wire.chunk(event), wire.LAST_CHUNK]
    fake_vllm.script = lambda _: stream if streamed else [whole]
    running = await start_proxy()

    line, _, got = wire.split(await running.send(wire.post(body_with(b"1"), path=path)))

    ours = "completions" in path
    expected = edited(body) if ours else body
    assert (line, got) == ("HTTP/1.1 200 OK", b"data: %b\n\n" % expected if streamed else expected)
    exchange = (await running.captured(1))[0]
    assert exchange.untrainable_reason == "unreadable_reply"
    assert running.metric("sidecar_captures_lost_total", reason="unreadable") == 0
