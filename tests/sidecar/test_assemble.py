"""What makes an exchange fit to learn from, and each thing that does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sidecar.assemble import RawCapture, assemble
from sidecar.records import (
    Choice,
    Exchange,
    Sampling,
    Timings,
    decode_exchange,
    encode_exchange,
)
from sidecar.routing import Assignment

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
    raw = RawCapture(
        exchange_id="ex_1",
        public_model="m",
        route=ROUTE,
        replica="http://vllm",
        session_key="h:s",
        user="ann",
        request=json.dumps(REQUEST).encode(),
        reply=(reply[:10], reply[10:]),
        streamed=False,
        status=200,
        outcome="ok",
        timings=TIMINGS,
    )
    return replace(raw, **changes)


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
        prompt_token_ids=(1, 2, 3),
        sampling=Sampling(temperature=0.7, seed=3, max_tokens=9),
        stream=False,
        status=200,
        outcome="ok",
        timings=TIMINGS,
        completion_tokens=2,
        user="ann",
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
    ],
)
def test_sampling_is_what_was_said_and_never_a_guess(
    request_body: dict[str, Any], sampling: Sampling, reason: str | None
) -> None:
    exchange = assemble(_raw(_reply(), request=json.dumps(request_body).encode()))

    assert (exchange.sampling, exchange.untrainable_reason) == (sampling, reason)


def test_a_request_that_only_pythons_json_reads_is_not_learned_from() -> None:
    exchange = assemble(_raw(_reply(), request=b'{"temperature":NaN}'))

    assert exchange.untrainable_reason == "unreadable_sampling"
