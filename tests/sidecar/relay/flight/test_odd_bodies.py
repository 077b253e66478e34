"""What a JSON reader refuses is answered, or passed on, counted and logged; nothing breaks."""

from __future__ import annotations

import json
import sys

import pytest
from structlog.testing import capture_logs

from sidecar.capture.assemble import assemble
from sidecar.records import Surface, encode_exchange
from sidecar.relay.best_of import plan_best_of
from sidecar.relay.heads import RequestHeaders
from sidecar.relay.plan import Plan, plan_request
from sidecar.relay.refusals import names_unknown_model
from sidecar.relay.reply_edit import STRIP_USUAL, strip_event, strip_reply
from sidecar.relay.surfaces import BY_PATH
from sidecar.routing.assignment import CompiledRouting
from sidecar.routing.session_key import KnownSessions
from sidecar.routing.table import RoutingTable
from support.exchanges import make_raw_capture
from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

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


@pytest.mark.parametrize(("path", "size"), [(PATHS[0], 0), (PATHS[0], LONG), (PATHS[3], LONG)])
async def test_a_body_that_no_reader_takes_is_answered_as_vllm_does_counted_and_logged_once(
    path: str, size: int, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()
    context = running.proxy._relay._context
    context.rate_limited_log._clock = lambda: 0.0
    bodies = [(body_with(value, size=size), reason) for value, reason in REFUSED.values()]
    # Only this one is read by msgspec alone.
    bodies.append((body_with(nested(20_000), size=size, more=b"0"), "nested_too_deep"))

    with capture_logs() as logs:
        for sent_body, reason in bodies:
            before = running.metric("sidecar_bodies_unreadable_total", reason=reason)

            line, _, body = wire.split(await running.send(wire.post(sent_body, path=path)))

            assert (line, body) == ("HTTP/1.1 400 Bad Request", PARSING)
            now = running.metric("sidecar_bodies_unreadable_total", reason=reason)
            assert now == before + 1

    told = [item for item in logs if item["event"] == "body_unreadable"]
    assert len(told) == 1
    assert told[0]["reason"] == "nested_too_deep"
    assert fake_vllm.requests == []
    assert running.metric("sidecar_requests_total", status="400") == len(bodies)
    assert running.metric("sidecar_requests_in_flight") == 0


@pytest.mark.parametrize(("path", "size"), [(one, LONG) for one in PATHS[:4]] + [(PATHS[0], 0)])
async def test_what_vllm_reads_goes_on_to_it_whatever_a_stricter_reader_thinks(
    path: str, size: int, fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    for value in LEFT_TO_VLLM.values():
        sent = body_with(value, size=size)
        reply = await running.send(wire.post(sent, path=path))

        assert reply.startswith(b"HTTP/1.1 200")
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
            plan = plan_request(rule, body, RequestHeaders(), TABLE, KnownSessions(), metered=True)
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

            exchange = assemble(
                make_raw_capture(reply=(reply,), surface=surface, streamed=streamed)
            )

            assert encode_exchange(exchange)
            assert exchange.untrainable_reason is not None
            for choice in exchange.choices:
                json.loads(choice.message)
