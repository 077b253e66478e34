"""What makes an exchange fit to learn from, and each thing that does not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from sidecar.capture.assemble import Turns, assemble
from sidecar.records import (
    Assignment,
    Choice,
    Exchange,
    RawCapture,
    SampledFields,
    Sampling,
    Timings,
    decode_exchange,
    encode_exchange,
    read_prompt_ids,
)
from sidecar.relay.peek import peek_request
from sidecar.tracing.telemetry import token_counts
from support.exchanges import make_raw_capture

REQUEST = {"model": "m", "messages": [], "temperature": 0.7, "seed": 3, "max_tokens": 9}
ROUTE = Assignment(adapter="m--v1", arm="canary", propensity=0.2, upstream_model="m--v1")
TIMINGS = Timings(started_at=100.0, first_byte_s=0.1, total_s=0.3, overhead_s=0.001)


def _reply(**changes: Any) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ok"},
        "finish_reason": "stop",
        "token_ids": [7, 2],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
    }
    choice.update(changes.pop("choice", {}))
    reply = {
        "model": "m--v1",
        "prompt_token_ids": [1, 2, 3],
        "choices": [choice],
        "usage": {"completion_tokens": 2},
    }
    return json.dumps({**reply, **changes}).encode()


def _raw(reply: bytes, **changes: Any) -> RawCapture:
    plain = {
        "route": ROUTE,
        "user": "ann",
        "timings": TIMINGS,
        "request": json.dumps(REQUEST).encode(),
    }
    return make_raw_capture(reply=(reply[:10], reply[10:]), **{**plain, **changes})


def test_everything_that_was_seen_is_in_the_exchange() -> None:
    exchange = assemble(_raw(_reply()))

    assert exchange == Exchange(
        exchange_id="ex_1",
        surface="chat",
        public_model="m",
        adapter="m--v1",
        arm="canary",
        propensity=0.2,
        replica="http://vllm",
        session_key="h:s",
        request=json.dumps(REQUEST).encode(),
        choices=(
            Choice(
                index=0,
                message=b'{"role":"assistant","content":"ok"}',
                finish_reason="stop",
                token_ids=(7, 2),
                logprobs=(-0.5, -0.25),
            ),
        ),
        prompt_ids=b"[1,2,3]",
        sampling=Sampling(temperature=0.7, seed=3, max_tokens=9),
        stream=False,
        status=200,
        outcome="ok",
        timings=TIMINGS,
        completion_tokens=2,
        user="ann",
        turn_id="ex_1",
        request_bytes=len(json.dumps(REQUEST)),
        reply_bytes=len(_reply()),
    )
    assert decode_exchange(encode_exchange(exchange)) == exchange


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"choices": []}, "no_choices"),
        ({"model": "m"}, "model_mismatch"),
        ({"prompt_token_ids": None}, "ids_missing"),
        ({"choice": {"token_ids": None}}, "ids_missing"),
        ({"choice": {"logprobs": None}}, "logprobs_missing"),
        ({"choice": {"token_ids": [7, 2, 3]}}, "count_mismatch"),
        ({"choice": {"logprobs": {"content": [{"logprob": -0.5}]}}}, "count_mismatch"),
        ({"usage": {"completion_tokens": 3}}, "count_mismatch"),
        ({"usage": None}, None),
        ({"error": {"type": "x"}}, "upstream_error"),
    ],
)
def test_each_gap_has_its_reason(changes: dict[str, Any], reason: str | None) -> None:
    assert assemble(_raw(_reply(**changes))).untrainable_reason == reason


@pytest.mark.parametrize("outcome", ["cut", "upstream_error"])
def test_a_reply_without_its_end_is_kept_and_not_learned_from(outcome: Any) -> None:
    exchange = assemble(_raw(_reply()[:40], outcome=outcome))

    assert (exchange.outcome, exchange.untrainable_reason) == (outcome, outcome)
    assert exchange.choices == ()


def test_a_reply_that_cannot_be_read_is_kept_and_not_learned_from() -> None:
    exchange = assemble(_raw(b"<html>"))

    assert (exchange.outcome, exchange.untrainable_reason) == ("ok", "unreadable_reply")


def test_a_stream_that_ends_without_done_is_not_learned_from() -> None:
    event = b"data: " + _reply().replace(b'"message"', b'"delta"') + b"\n\n"
    done = b"data: [DONE]\n\n"

    assert assemble(_raw(event + done, streamed=True)).untrainable_reason is None
    assert assemble(_raw(event, streamed=True)).untrainable_reason == "stream_incomplete"


@pytest.mark.parametrize(
    ("request_body", "sampling", "reason"),
    [
        ({}, Sampling(), None),
        ({"max_tokens": 5, "max_completion_tokens": 6}, Sampling(max_tokens=6), None),
        ({"top_p": 1, "top_k": -1, "min_p": 0.0}, Sampling(top_p=1, top_k=-1, min_p=0.0), None),
        ({"temperature": "0.7"}, Sampling(), "unreadable_sampling"),
        ({"seed": 1.5}, Sampling(), "unreadable_sampling"),
        ({"temperature": True}, Sampling(), "unreadable_sampling"),
        ({"max_tokens": 10**30, "temperature": 10**400}, Sampling(), "unreadable_sampling"),
    ],
)
def test_sampling_is_what_was_said_and_never_a_guess(
    request_body: dict[str, Any], sampling: Sampling, reason: str | None
) -> None:
    exchange = assemble(_raw(_reply(), request=json.dumps(request_body).encode()))

    assert (exchange.sampling, exchange.untrainable_reason) == (sampling, reason)


@pytest.mark.parametrize("body", [b'{"temperature":NaN}', b'{"x":' + b"[" * 100_000, b"\xff", b""])
def test_a_request_that_msgspec_does_not_read_is_not_learned_from(body: bytes) -> None:
    exchange = assemble(_raw(_reply(), request=body))

    assert exchange.untrainable_reason == "unreadable_sampling"


def test_the_limit_of_a_responses_request_has_its_own_name() -> None:
    body = json.dumps({"max_output_tokens": 5, "max_tokens": 6}).encode()

    assert assemble(_raw(b"{}", request=body, surface="responses")).sampling.max_tokens == 5
    assert assemble(_raw(b"{}", request=body, surface="messages")).sampling.max_tokens == 6


def test_a_text_that_was_not_sampled_is_not_learned_from() -> None:
    tokens = [{"token": "o", "logprob": -0.5}, {"token": "h", "logprob": -0.25}]
    reply = _reply(choice={"logprobs": {"content": tokens}})

    assert assemble(_raw(reply)).untrainable_reason == "text_mismatch"
    assert assemble(_raw(reply.replace(b'"h"', b'"k"'))).untrainable_reason is None


@pytest.mark.parametrize(
    ("streamed", "first_byte_s", "per_token_s"),
    [(True, 0.1, pytest.approx(0.2)), (True, None, None), (False, 0.1, None)],
)
def test_the_time_between_tokens_is_that_of_a_stream(
    streamed: bool, first_byte_s: float | None, per_token_s: Any
) -> None:
    event = b"data: " + _reply().replace(b'"message"', b'"delta"') + b"\n\n"
    timings = Timings(started_at=1.0, queue_s=0.01, first_byte_s=first_byte_s, total_s=0.3)

    read = assemble(_raw(event if streamed else _reply(), streamed=streamed, timings=timings))

    assert read.timings == replace(timings, per_token_s=per_token_s)


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("client", "own", "expected"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", "", TRACE),
        ("", f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"00-{'a' * 32}-b7ad6b7169203331-01", f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        ("00-short-b7ad6b7169203331-01", "", ""),
    ],
)
def test_the_trace_is_the_one_that_went_to_vllm(client: str, own: str, expected: str) -> None:
    exchange = assemble(_raw(_reply(), traceparent=client, own_traceparent=own))

    assert exchange.trace_id == expected


def test_who_asked_and_what_it_weighed_is_kept() -> None:
    turns = Turns()
    who = {"project": "p", "key_id": "k1", "fallback_from": "m--v2"}
    failed = assemble(_raw(b"", outcome="upstream_error", status=502, **who), turns)
    retried = assemble(_raw(_reply(), exchange_id="ex_2", retry_count=1, **who), turns)

    assert (retried.project, retried.key_id, retried.fallback_from) == ("p", "k1", "m--v2")
    assert (retried.request_bytes, retried.reply_bytes) == (len(json.dumps(REQUEST)), len(_reply()))
    assert (failed.retry_count, retried.retry_count) == (0, 1)
    assert failed.turn_id == retried.turn_id != ""
    assert assemble(_raw(_reply(), reply_bytes=5)).reply_bytes == 5


@pytest.mark.parametrize(
    ("written", "ids", "reason"),
    [
        (b"", (), None),
        (b"[5, 6,7]", (5, 6, 7), None),
        (b'["a"]', (), "ids_missing"),
        (b"[1.5]", (), "ids_missing"),
        (b"[1", (), "ids_missing"),
    ],
)
def test_ingest_reads_the_prompts_ids(
    written: bytes, ids: tuple[int, ...], reason: str | None
) -> None:
    exchange = replace(assemble(_raw(_reply())), prompt_ids=written)

    read = read_prompt_ids(exchange)

    assert (read.prompt_ids, read.prompt_token_ids, read.untrainable_reason) == (b"", ids, reason)
    assert reason or token_counts(exchange)[0] == token_counts(read)[0] == len(ids)


BODIES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from([*SampledFields.__struct_fields__, "messages", "model"]),
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.lists(st.just({}), max_size=1),
    max_size=6,
)


@given(BODIES)
def test_what_routing_read_says_the_same_as_the_body(body: dict[str, Any]) -> None:
    written = json.dumps(body).encode()
    fields = peek_request(written).fields

    read = assemble(_raw(_reply(), request=written))
    given_fields = assemble(_raw(_reply(), request=written, fields=fields))

    assert given_fields == read


def test_a_record_of_an_older_writer_is_still_read() -> None:
    exchange = assemble(_raw(_reply()))
    record = msgspec.msgpack.decode(encode_exchange(exchange))
    newer = ("turn_id", "retry_count", "request_bytes", "reply_bytes", "key_id", "fallback_from")
    old = {key: value for key, value in record.items() if key not in newer}
    old["timings"] = {"started_at": 100.0, "total_s": 0.3}
    old |= {"trace_id": "", "project": "default"}  # an older writer left no default out

    decoded = decode_exchange(msgspec.msgpack.encode(old))

    assert (decoded.exchange_id, decoded.turn_id, decoded.request_bytes) == ("ex_1", "", 0)
    assert decoded.timings == Timings(started_at=100.0, total_s=0.3)
    assert decoded.choices == exchange.choices
