"""Spans of members, by the fast walk and by the scan."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.relay import json_spans
from sidecar.relay.json_spans import elements, members

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=6)
STYLES = st.sampled_from([(None, (",", ":")), (None, (" , ", " : ")), (2, None)])


def _same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is NaN here


@given(OBJECT, STYLES, st.booleans())
def test_every_member_is_found_at_its_place(value: dict, style: tuple, ascii_only: bool) -> None:
    indent, separators = style
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)
    data = text.encode("utf-8", "surrogatepass")

    found = members(data)

    assert [member.key for member in found] == list(value)
    for member in found:
        assert _same(json.loads(data[member.start : member.end]), value[member.key])


@given(OBJECT, STYLES)
def test_the_walk_and_the_scan_agree(value: dict, style: tuple) -> None:
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
def test_odd_objects_give_exact_spans(data: bytes, expected: list) -> None:
    found = [(member.key, data[member.start : member.end]) for member in members(data)]

    assert found == expected


@given(st.lists(JSON, max_size=6), STYLES)
def test_every_element_is_found_at_its_place(value: list, style: tuple) -> None:
    indent, separators = style
    data = b"xx" + json.dumps(value, indent=indent, separators=separators).encode() + b"yy"

    spans = elements(data, 2, len(data) - 2)

    assert _same([json.loads(data[start:end]) for start, end in spans], value)


def test_an_object_inside_other_bytes_is_read_within_its_bounds() -> None:
    data = b'data: {"a":[1,2]}\n\ndata: {"b":3}'

    found = members(data, 6, 17)

    assert [(member.key, data[member.start : member.end]) for member in found] == [("a", b"[1,2]")]
