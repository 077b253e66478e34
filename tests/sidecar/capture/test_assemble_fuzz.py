"""Whatever vLLM sends: it is read, or said to be unreadable; never an error of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sidecar.capture.assemble import assemble
from sidecar.records import Assignment, decode_exchange, encode_exchange
from support.exchanges import make_raw_capture

RECORDED = Path(__file__).parents[1] / "recorded"
NAMES = sorted(
    path.name
    for path in RECORDED.iterdir()
    if path.is_file() and "plain" not in path.name and "two" not in path.name
)
SURFACES = ("completions", "responses", "messages")
ROUTE = Assignment(adapter="base", arm="champion", propensity=1.0, upstream_model="smollm2-135m")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)  # what a record can hold; more is `unwritable`
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["index", "function", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def _check(name: str, body: bytes) -> None:
    surface: Any = next((one for one in SURFACES if name.startswith(one)), "chat")
    raw = make_raw_capture(
        reply=(body,), streamed=name.endswith(".sse"), surface=surface, route=ROUTE
    )
    exchange = assemble(raw)
    decoded = decode_exchange(encode_exchange(exchange))
    assert decoded.choices or decoded.untrainable_reason is not None
    for choice in decoded.choices:
        message = json.loads(choice.message)
        assert {"role", "content"} <= message.keys()


def _replace_one(value: Any, path: list[int], new: Any) -> Any:
    """The value with one thing inside it exchanged: the numbers choose the way down."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    if isinstance(value, list):
        at = path[0] % len(value)
        return [*value[:at], _replace_one(value[at], path[1:], new), *value[at + 1 :]]
    key = list(value)[path[0] % len(value)]
    return {**value, key: _replace_one(value[key], path[1:], new)}


def _in_document(body: bytes, stream: bool, at: int, change: Callable[[Any], Any]) -> bytes:
    if not stream:
        return json.dumps(change(json.loads(body))).encode()
    lines = body.split(b"\n")
    places = [n for n, line in enumerate(lines) if line.startswith(b"data: {")]
    place = places[at % len(places)]
    lines[place] = b"data: " + json.dumps(change(json.loads(lines[place][6:]))).encode()
    return b"\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, derandomize=True)
@given(
    at=st.integers(0, 1000),
    path=st.lists(st.integers(0, 20), min_size=1, max_size=7),
    new=json_values,
)
def test_a_value_of_another_kind_anywhere(name: str, at: int, path: list[int], new: Any) -> None:
    body = _in_document(
        (RECORDED / name).read_bytes(),
        name.endswith(".sse"),
        at,
        lambda document: _replace_one(document, path, new),
    )

    _check(name, body)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, derandomize=True)
@given(start=st.integers(0, 10_000), length=st.integers(0, 300), new=st.binary(max_size=8))
def test_bytes_that_were_lost_or_changed_anywhere(
    name: str, start: int, length: int, new: bytes
) -> None:
    body = (RECORDED / name).read_bytes()
    start %= len(body)

    _check(name, body[:start] + new + body[start + length :])
