"""What a reply cost is found in it wherever vLLM writes it, and nowhere else."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from sidecar.relay.usage import MAX_USAGE_BYTES, UsageMeter
from support.memory import traced_bytes
from support.proxy_kit import Wire

TOLD = {
    **{"chat.plain": 42, "chat.asked": 42, "completions.plain": 10, "completions.asked": 10},
    **{"responses.plain": 44, "responses_stream.plain": 44, "messages.plain": 44},
    **{"messages_stream.plain": 44, "chat_usage_stream.asked": 42},
    **{"chat_usage_stream.plain": 42, "messages_tools_stream.plain": 195},
    **{"responses_tools_stream.plain": 175, "chat_stream.plain": None},
}
USAGE = {"prompt_tokens": 1000, "total_tokens": 1516, "completion_tokens": 516}


def metered(*pieces: bytes) -> UsageMeter:
    meter = UsageMeter()
    for piece in pieces:
        meter.feed(piece)
    return meter


def written(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def event(value: Any, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + written(value) + b"\n\n"


@pytest.mark.parametrize(("name", "told"), TOLD.items())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_the_usage_of_a_recorded_reply_is_found_however_it_is_cut(
    name: str, told: int | None, data: st.DataObject, wire: Wire
) -> None:
    body = wire.recording(name).body
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=5))

    meter = metered(*(body[a:b] for a, b in pairwise([0, *sorted(cuts), len(body)])))

    assert meter.told == told


def test_what_a_client_has_repeated_to_it_is_no_usage() -> None:
    """vLLM repeats tools and metadata of `/v1/responses` in its reply and in its first events."""
    free = {"usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}}
    tools = [{"type": "function", "parameters": free}]
    said = {"tools": tools, "text": {"format": free}, "metadata": free}
    quoted = written({"usage": USAGE}).decode()

    assert metered(written({"id": "1", **said, "user": quoted})).told is None
    assert metered(event({"type": "x", "response": {**said, "user": quoted}})).told is None
    assert metered(written({"usage": USAGE, **said})).told == 1516
    assert metered(written({**said, 'a\\"usage': 1, "usage": USAGE})).told == 1516
    assert metered(written({'a"usage': {"total_tokens": 1}, "usage": None})).told is None


def test_what_anthropics_input_leaves_out_is_counted_too() -> None:
    usage = {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 50}

    assert metered(written({"usage": usage})).told == 57
    assert metered(written({"usage": {**usage, "cache_creation_input_tokens": 2}})).told == 59


def test_the_usage_that_was_told_last_counts() -> None:
    events = [event({"choices": [], "usage": {**USAGE, "total_tokens": n}}) for n in (5, 6, 7)]

    assert metered(*events).told == 7
    assert metered(b"".join(events)).told == 7


def test_a_stream_that_was_cut_costs_its_prompt_and_its_events() -> None:
    begun = event({"type": "message_start", "message": {"usage": {"input_tokens": 36}}}, "m")
    deltas = event({"type": "content_block_delta", "delta": {"text": "a"}}, "c") * 9

    assert metered(begun, deltas).at_least(request_bytes=4000, pieces=2) == 36 + 10
    assert metered(deltas).at_least(request_bytes=4000, pieces=2) == 1000 + 9
    assert metered().at_least(request_bytes=60_000, pieces=0) == 15_000


@given(st.binary(max_size=200), st.lists(st.binary(max_size=30), max_size=5))
def test_no_bytes_make_it_fail(first: bytes, more: list[bytes]) -> None:
    spoilt = [b'{"usage":{', first, *more, b'"usage":{"total_tokens":', b"{", b"}"]

    assert isinstance(metered(*spoilt).told, int | None)
    assert isinstance(metered(b"data: ", *spoilt).told, int | None)


def test_an_invalid_event_costs_only_itself() -> None:
    broken = b'data: {"a":"unended [[[[{\n\n' + b"data: ]]]]}}}}\n\n"

    assert metered(broken, event({"usage": USAGE})).told == 1516
    assert metered(broken + event({"usage": USAGE})).told == 1516


@pytest.mark.parametrize(
    "piece",
    [
        b'{"a":"' + b"x" * 1000,
        b"[" * 1000,
        b'"usage":{' * 100,
        b"\\" * 1000,
        b'\\"' * 500,
        b'"' * 999,
    ],
)
def test_it_holds_no_more_than_a_usage_of_a_reply_without_end(piece: bytes) -> None:
    meter = metered(b'{"choices":[')
    tracemalloc.start()
    try:
        for _ in range(200):
            meter.feed(piece)
        held = traced_bytes("/sidecar/relay/", "/test_usage.py")
    finally:
        tracemalloc.stop()

    assert 0 < held < 2 * MAX_USAGE_BYTES
    assert len(meter._rest) <= MAX_USAGE_BYTES + len(piece)
