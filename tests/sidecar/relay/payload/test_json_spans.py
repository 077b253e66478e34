"""Spans of members, by the fast walk and by the scan."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from sidecar.relay import request_edit as json_spans
from sidecar.relay.request_edit import elements, members, value_end

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=6)
Style = tuple[int | None, tuple[str, str] | None]
"""`indent` and `separators` of `json.dumps`."""
SPELLED: list[Style] = [(None, (",", ":")), (None, (" , ", " : ")), (2, None)]
STYLES = st.sampled_from(SPELLED)


def _same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is NaN here


@given(OBJECT, STYLES, st.booleans())
def test_every_member_is_found_at_its_place(
    value: dict[str, object], style: Style, ascii_only: bool
) -> None:
    indent, separators = style
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)
    data = text.encode("utf-8", "surrogatepass")

    found = members(data)

    assert [member.key for member in found] == list(value)
    for member in found:
        assert _same(json.loads(data[member.start : member.end]), value[member.key])


@pytest.mark.parametrize("key", [b"model\xff", b"\xff\\n", b"\xed\xa0"])
def test_a_key_that_is_no_text_hides_no_other(key: bytes) -> None:
    found = members(b'{"%b":1,"model":"m"}' % key)

    assert len(found) == 2
    assert found[1].key == "model"


@given(OBJECT, STYLES)
def test_the_walk_and_the_scan_agree(value: dict[str, object], style: Style) -> None:
    indent, separators = style
    data = json.dumps(value, indent=indent, separators=separators).encode()

    assert members(data) == json_spans._scan(data, 0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a":1,"b":2,"a":3}', [("a", b"1"), ("b", b"2"), ("a", b"3")]),
        (b'{"a":12,"a":1}', [("a", b"12"), ("a", b"1")]),  # one value begins like the other
        (b'{"a":1,"a":12}', [("a", b"1"), ("a", b"12")]),
        (b'{"a":1,"b":2,"a":1}', [("a", b"1"), ("b", b"2"), ("a", b"1")]),
        (b'{"a":NaN,"b":-Infinity}', [("a", b"NaN"), ("b", b"-Infinity")]),
        (b'{"mod\\u0065l":"x"}', [("model", b'"x"')]),
        (b'{"a":"\\ud800","b":1}', [("a", b'"\\ud800"'), ("b", b"1")]),
        (b'{"a":"}\\"{","b":["]\\\\"]}', [("a", b'"}\\"{"'), ("b", b'["]\\\\"]')]),
        (b" \n{ } ", []),
    ],
)
def test_odd_objects_give_exact_spans(data: bytes, expected: list[tuple[str, bytes]]) -> None:
    found = [(member.key, data[member.start : member.end]) for member in members(data)]

    assert found == expected


@given(st.lists(JSON, max_size=6), STYLES)
def test_every_element_is_found_at_its_place(value: list[object], style: Style) -> None:
    indent, separators = style
    data = b"xx" + json.dumps(value, indent=indent, separators=separators).encode() + b"yy"

    spans = elements(data, 2, len(data) - 2)

    assert _same([json.loads(data[start:end]) for start, end in spans], value)


BRACKETS = st.recursive(
    st.just("0") | st.text('[]{}"\\\\,x').map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
        | inner.map(lambda part: f'{{"]":{part}}}')
    ),
    max_leaves=30,
)


@given(BRACKETS, st.integers(0, 300), st.integers(0, 40_000), st.integers(0, 2))
def test_a_container_ends_where_pythons_reader_says(
    inner: str, depth: int, padding: int, place: int
) -> None:
    parts = ["0", inner, "0"]
    parts[place] = json.dumps('\\"]' * (padding // 3))
    text = "[" * depth + f"[{','.join(parts)}]" + "]" * depth
    _, expected = json.JSONDecoder().raw_decode(text)

    assert value_end(text.encode() + b',"x":[]]', 0) == expected == len(text)
    assert value_end(b"ab" + text.encode(), 2) == len(text) + 2


@pytest.mark.parametrize("cut", [1, 40, 64, 65, 500, 20_000, 39_999])
@pytest.mark.parametrize("unit", [b"[]", b'"\\"",', b"[[],"])
def test_a_container_that_does_not_end_is_refused(unit: bytes, cut: int) -> None:
    with pytest.raises(ValueError, match=r"does not end|not found"):
        value_end((b"[" + unit * 20_000)[:cut], 0)


SIZE = 600_000
ODD = {
    "nested": b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "nested again and again": b"[" + (b"[" * 500 + b"]" * 500 + b",") * (SIZE // 1001) + b"0]",
    "empty lists": b"[" + b"[]," * (SIZE // 3) + b"0]",
    "empty texts": b"[" + b'"",' * (SIZE // 3) + b"0]",
    "escaped quotes": b'["' + rb"\"" * (SIZE // 2) + b'"]',
    "backslashes": b'["' + b"\\" * (SIZE // 2) + b'"]',
}
SLOWER = 5
"""Than Python's own reader, which is C, on as many bytes of numbers, at most. A step in Python for
each bracket is 10 to 20 times slower than that."""


def best_of_three(call: Callable[[], object]) -> float:
    """CPU seconds."""
    seconds = []
    for _ in range(3):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return min(seconds)


@pytest.mark.parametrize("kind", ODD)
def test_no_document_takes_a_step_in_python_for_each_bracket_or_text(kind: str) -> None:
    flat = b"[" + b"0," * (SIZE // 2) + b"0]"
    odd = b'{"a":1,"a":%b}' % ODD[kind]  # a key that comes twice: the fast walk gives up
    assert members(odd)[1].end == len(odd) - 1

    ratio = best_of_three(lambda: members(odd)) / best_of_three(lambda: json.loads(flat))

    assert ratio < SLOWER
