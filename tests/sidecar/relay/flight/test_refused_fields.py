"""An engine that does not take what only the sidecar adds to a request: its users do not notice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from sidecar.relay.replicas import Replica, Replicas
from sidecar.relay.reply import PASSED, StreamOpening, is_error
from sidecar.relay.upstream import CAPTURE, REFUSALS, OwnFields
from support import api_keys
from support.fake_vllm import FakeVllm, SeenRequest, Step
from support.migrated_store import open_migrated
from support.proxy_kit import FreePort, Running, StartProxy, Wire

WIRE = Wire()
ERROR = {"message": "list index out of range", "type": "InternalServerError", "param": None}
FORMS: dict[str, Any] = {
    "vllm": {"error": {**ERROR, "code": 500}},
    "old vllm": {"object": "error", **ERROR, "code": 500},
    "anthropic": {"type": "error", "error": {"type": "api_error", "message": "no"}},
    "detail": {"detail": "Extra inputs are not permitted"},
}
HEADERS = "Accept-Encoding: gzip\r\n"


def dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % dumped(value)


def streamed(*events: bytes) -> list[Step]:
    chunks = [WIRE.chunk(one) for one in (*events, b"data: [DONE]\n\n")]
    return [WIRE.STREAM_HEAD, *chunks, WIRE.LAST_CHUNK]


def asks_of(seen: SeenRequest) -> frozenset[str]:
    """What of our additions a request has."""
    body = json.loads(seen.body)
    found = {name for name in ("logprobs", "return_token_ids") if body.get(name)}
    if (body.get("stream_options") or {}).get("include_usage"):
        found.add("include_usage")
    if "accept-encoding" not in seen.headers:
        found.add("no accept-encoding")
    return frozenset(found)


def good(seen: SeenRequest) -> list[Step]:
    """As vLLM answers: the fields are there in any case, and null when they are not asked for."""
    body, asks = json.loads(seen.body), asks_of(seen)
    logprobs = {"content": [{"token": "Hi", "logprob": -0.5}]} if "logprobs" in asks else None
    ids, prompt = ([7], [1, 2]) if "return_token_ids" in asks else (None, None)
    base = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    usage = {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}
    more = {"index": 0, "logprobs": logprobs, "finish_reason": "stop", "token_ids": ids}
    if not body.get("stream"):
        choice = {**more, "message": {"role": "assistant", "content": "Hi"}}
        reply = {**base, "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
        return [WIRE.whole_reply(dumped(reply))]
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
    events = [
        event({**base, "choices": [{**role, "finish_reason": None}], "prompt_token_ids": prompt}),
        event({**base, "choices": [{**more, "delta": {"content": "Hi"}}]}),
    ]
    if "include_usage" in asks:
        events.append(event({**base, "choices": [], "usage": usage}))
    return streamed(*events)


@dataclass(frozen=True)
class Failure:
    """How an engine fails."""

    status: int = 500
    form: str = "vllm"
    where: str = "status"
    """status, body (200 with an error in it), or in a stream: first, or after the role."""
    cut: int = 0
    """At which byte its stream is cut in two reads."""

    def steps(self, *, stream: bool) -> list[Step]:
        error = FORMS[self.form]
        if self.where == "body" or (self.where != "status" and not stream):
            return [WIRE.whole_reply(dumped(error))]
        if self.where == "status":
            return [WIRE.whole_reply(dumped(error), f"{self.status} Not Here")]
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        before = {
            "first": b"",
            "after the role": event(role),
            "after a comment": b": ping\n\n",
        }[self.where]
        if self.form == "anthropic":
            told = b"event: error\r\ndata: %b\r\n\r\n" % dumped(error)
        else:
            told = event(error)
        whole = before + told
        cut = min(self.cut, len(whole) - 1)
        return streamed(*(piece for piece in (whole[:cut], whole[cut:]) if piece))


@dataclass(frozen=True)
class Engine:
    """It fails on some of our additions, perhaps only together with tools or with `n`; and on a
    client's own mistake in any case."""

    fails_on: frozenset[str]
    only_with: str
    failure: Failure

    def play(self, seen: SeenRequest) -> Sequence[Step]:
        body = json.loads(seen.body)
        if body.get("wrong"):
            return [WIRE.whole_reply(dumped(FORMS["vllm"]), f"{body['wrong']} Yours")]
        concerns = not self.only_with or self.only_with in body
        if concerns and self.fails_on & asks_of(seen):
            return self.failure.steps(stream=bool(body.get("stream")))
        return good(seen)


failures = st.builds(
    Failure,
    status=st.sampled_from([400, 401, 404, 422, 429, 500, 501, 502, 503]),
    form=st.sampled_from(["vllm", "old vllm", "anthropic"]),
    where=st.sampled_from(["status", "body", "first", "after the role", "after a comment"]),
    cut=st.integers(0, 150),
) | st.builds(Failure, status=st.sampled_from([400, 422, 500]), form=st.just("detail"))
engines = st.builds(
    Engine,
    fails_on=st.frozensets(
        st.sampled_from(["logprobs", "return_token_ids", "include_usage", "no accept-encoding"]),
        min_size=1,
    ),
    only_with=st.sampled_from(["", "tools", "n"]),
    failure=failures,
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans(),
        "tools": st.just([]),
        "n": st.just(1),
        "wrong": st.sampled_from([400, 404, 500]),
        "logprobs": st.booleans(),
        "return_token_ids": st.just(True),
        "stream_options": st.just({"include_usage": True}),
    },
)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[Replica]:
    """Those of the proxy that is started."""
    made: list[Replica] = []

    def make(given: Sequence[Replica]) -> Replicas:
        made.extend(given)
        return Replicas(given)

    monkeypatch.setattr("sidecar.proxy.Replicas", make)
    return made


@pytest.fixture
async def metered(
    replicas: list[Replica], start_proxy: StartProxy, free_port: FreePort, state_dir: Path
) -> tuple[Running, str]:
    """A proxy, and the header of a key with an allowance of tokens: its usage is asked for too."""
    database = open_migrated(state_dir / "store.db")
    _, key = api_keys.create(database, tokens_per_day=10**9)
    database.close()
    running = await start_proxy(access={"mode": "keys"}, proxy={"port": free_port()})
    return running, f"Authorization: Bearer {key}\r\n"


def body_of(fields: dict[str, Any]) -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    return dumped({"model": "smollm2-135m", "messages": messages, **fields})


def plain(reply: bytes) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers but for ours and the framing, body."""
    line, headers, body = WIRE.split(reply)
    framing = ("content-length", "transfer-encoding", "connection")
    ours = ("x-sidecar-", "x-ratelimit-")
    kept = {
        name: value
        for name, value in headers.items()
        if name not in framing and not name.startswith(ours)
    }
    return line, kept, body


@settings(
    max_examples=120,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(engines, st.lists(requests, min_size=1, max_size=5))
@example(Engine(frozenset({"logprobs"}), "tools", Failure(503)), [{}, {"tools": []}] * 3)
async def test_the_reply_equals_the_direct_one_whatever_the_engine_thinks_of_our_fields(
    metered: tuple[Running, str],
    replicas: list[Replica],
    fake_vllm: FakeVllm,
    engine: Engine,
    asked: list[dict[str, Any]],
) -> None:
    running, key = metered
    fake_vllm.script = engine.play
    [replica] = replicas
    replica.fields = OwnFields()

    for fields in asked:
        sent = WIRE.post(body_of(fields), headers=HEADERS + key)
        seen = SeenRequest("", {"accept-encoding": "gzip"}, body_of(fields))
        direct = b"".join(step for step in engine.play(seen) if isinstance(step, bytes))
        before = len(fake_vllm.requests)

        assert plain(await running.send(sent)) == plain(direct)

        assert len(fake_vllm.requests) - before <= 2


CHAT = body_of({})
NO_LOGPROBS = Engine(frozenset({"logprobs"}), "", Failure())


async def test_after_three_refusals_it_is_asked_plainly_at_once_and_now_and_then_tried(
    replicas: list[Replica], fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = NO_LOGPROBS.play
    running = await start_proxy()
    url = f"http://127.0.0.1:{fake_vllm.port}"

    for _ in range(REFUSALS + 2):
        assert (await running.send(wire.post(CHAT))).startswith(b"HTTP/1.1 200")

    asked = ["logprobs" in asks_of(seen) for seen in fake_vllm.requests]
    assert asked == [True, False] * REFUSALS + [False] * 2
    assert fake_vllm.requests[-1].body == CHAT
    events = {"asked_again": 3, "refused": 3, "left_out": 2, "busy": 0}
    name = "sidecar_own_fields_total"
    assert {e: running.metric(name, replica=url, event=e) for e in events} == events
    exchanges = await running.captured(5)
    assert {(one.status, one.untrainable_reason) for one in exchanges} == {(200, "fields_refused")}
    gauge = "sidecar_replica_takes_fields"
    await running.metric_reaches(0.0, gauge, replica=url, fields="capture")
    assert running.metric(gauge, replica=url, fields="usage") == 1.0
    [replica] = replicas

    fake_vllm.script = good
    replica.fields = OwnFields()
    await running.send(wire.post(CHAT))

    assert (await running.captured(6))[-1].untrainable_reason != "fields_refused"


async def test_a_clients_own_mistakes_do_not_tell_against_our_fields(
    replicas: list[Replica], fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = NO_LOGPROBS.play
    running = await start_proxy()

    for _ in range(5):
        line, _, _ = wire.split(await running.send(wire.post(body_of({"wrong": 400}))))
        assert line == "HTTP/1.1 400 Yours"

    [replica] = replicas
    assert replica.fields.refused == 0
    assert len(fake_vllm.requests) == 10  # each was asked twice, and no more
    name = "sidecar_own_fields_total"
    assert running.metric(name, replica=replica.url, event="refused") == 0


async def test_a_busy_vllm_is_not_asked_twice_by_everybody(
    replicas: list[Replica], fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(dumped(FORMS["vllm"]), "503 Busy")]
    running = await start_proxy()
    [replica] = replicas
    before = time.monotonic()
    await running.send(wire.post(CHAT))
    assert len(fake_vllm.requests) == 2
    assert not replica.fields.may_ask_plainly(503, before)
    replica.fields.failed_plainly(503, 1e12)  # until far from now

    lines = {wire.split(await running.send(wire.post(CHAT)))[0] for _ in range(5)}

    assert (lines, len(fake_vllm.requests)) == ({"HTTP/1.1 503 Busy"}, 7)
    assert running.metric("sidecar_own_fields_total", replica=replica.url, event="busy") == 5


@pytest.mark.parametrize(
    "steps",
    [
        [WIRE.RESET],
        [WIRE.CLOSE],
        [b"HTTP/1.1 400 No\r\nContent-Length: 9\r\n\r\n{", WIRE.CLOSE],
        [WIRE.STREAM_HEAD, WIRE.chunk(b": ping\n\n"), WIRE.CLOSE],
    ],
    ids=["reset", "closed", "in a refusal", "in a stream"],
)
async def test_a_reply_that_breaks_off_before_the_client_has_a_byte_is_asked_for_plainly(
    steps: list[Step],
    replicas: list[Replica],
    fake_vllm: FakeVllm,
    start_proxy: StartProxy,
    wire: Wire,
) -> None:
    fake_vllm.script = lambda seen: steps if "logprobs" in asks_of(seen) else good(seen)
    running = await start_proxy()

    for _ in range(REFUSALS):
        assert (await running.send(wire.post(CHAT))).startswith(b"HTTP/1.1 200")

    [replica] = replicas
    assert replica.fields.refused == CAPTURE
    assert running.metric("sidecar_replica_ejections_total", replica=replica.url) == 0


async def test_the_role_of_a_good_stream_does_not_wait_for_the_answer(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    said = asyncio.Event()
    head, role, *rest = good(SeenRequest("", {}, body_of({"stream": True})))
    fake_vllm.script = lambda _: [head, role, said, *rest]
    running = await start_proxy()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(wire.post(body_of({"stream": True})))

    async with asyncio.timeout(60):
        first = await reader.readuntil(b'"content":""')
    said.set()
    after = await reader.read()
    writer.close()

    assert b"HTTP/1.1 200 OK" in first
    assert b'"content":"Hi"' in after


async def test_an_error_behind_the_first_words_goes_to_the_client_as_it_is(
    fake_vllm: FakeVllm, start_proxy: StartProxy, wire: Wire
) -> None:
    said = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi"}}]})
    fake_vllm.script = lambda _: streamed(said, event(FORMS["vllm"]))
    running = await start_proxy()

    _, _, body = wire.split(await running.send(wire.post(body_of({"stream": True}))))

    assert body == said + event(FORMS["vllm"]) + b"data: [DONE]\n\n"
    assert len(fake_vllm.requests) == 1


# -- the beginning of a stream, alone

ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
SAID = event({"choices": [{"index": 0, "delta": {"content": "Hi"}}]})


@given(st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_a_stream_comes_out_of_its_opening_as_it_went_in(places: list[int], fails: bool) -> None:
    whole = b": ping\n\n" + ROLE + (event(FORMS["vllm"]) if fails else SAID + SAID)
    bounds = [0, *sorted(min(place, len(whole)) for place in places), len(whole)]
    opening = StreamOpening(PASSED)

    out = [opening.feed(whole[a:b]) for a, b in pairwise(bounds)]

    assert (opening.failed, opening.holds) == (fails, fails)
    assert b"".join(out) + opening.end() == whole
    if fails:
        assert not any(out)


@pytest.mark.parametrize(
    "told",
    [
        b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\ndata: {"error":"no"}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[]}\n\ndata: {"error":"no"}\n\n',
        b'retry: 300\n\nevent: ping\ndata: {}\n\ndata: {"errors":["no"]}\n\n',
        b'\xef\xbb\xbfdata: {"detail":"no"}\n\n',
        b'data: {"error":"no"}',
        b': ping\r\revent: error\rdata: {"message":"no"}\r\r',
        b': ping\r\rdata: {"error":"no"}\r\r',
    ],
)
def test_a_stream_that_begins_with_an_error_of_any_form_has_failed(told: bytes) -> None:
    opening = StreamOpening(PASSED)

    assert opening.feed(told) + opening.end() == told

    assert opening.failed


@pytest.mark.parametrize(
    "delta",
    [
        '{"role":"assistant","content":""}',
        '{"role": "assistant"}',
        '{"content":null,"role":"assistant","tool_calls":[]}',
        '{"role":"assistant","content":"","refusal":null}',
    ],
)
def test_a_role_alone_waits(delta: str) -> None:
    opening = StreamOpening(PASSED)
    out = opening.feed(b'data: {"choices": [{"index": 0, "delta": %b}]}\n\n' % delta.encode())
    assert (out, opening.waits) == (b"", True)


@pytest.mark.parametrize(
    "first",
    [
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"token_ids":[7]}]}\n\n',
        b'data: {"choices":[{"index":0,"text":""}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\"error\\""}}]}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n',
    ],
)
def test_what_says_more_goes_at_once(first: bytes) -> None:
    opening = StreamOpening(PASSED)
    assert opening.feed(first) == first
    assert not opening.holds


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (dumped(FORMS["old vllm"]), True),
        (b'{"choices":[{"delta":{},"finish_reason":"error"}],"error":{"message":"no"}}', True),
        (b'{"error":null,"choices":[]}', False),
        (b'{"choices":[{"finish_reason":"error"}]}', False),
        (b'{"error"', False),
        (b'["error"]', False),
        (b"", False),
    ],
)
def test_an_error_is_recognised_by_its_members(body: bytes, expected: bool) -> None:
    assert is_error(body) is expected
