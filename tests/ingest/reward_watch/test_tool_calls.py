"""Tool calls against the tools of the request."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ingest.reward_watch.traits import fault_of_calls

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "at": {"type": ["number", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"zip": {"type": "string"}}, "required": ["zip"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def message(arguments: Any, name: Any = "weather") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": text}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Rome"},
        {"city": "Rome", "days": 3, "unit": "c", "at": None, "tags": ["a"], "where": {"zip": "1"}},
        {"city": "Rome", "days": 3.0, "at": 1.5, "tags": []},
    ],
)
def test_a_call_that_fits_is_valid(arguments: Any) -> None:
    assert fault_of_calls(message(arguments), TOOLS) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"city": 3},
        {"city": "Rome", "days": "3"},
        {"city": "Rome", "days": True},
        {"city": "Rome", "days": 2.5},
        {"city": "Rome", "unit": "k"},
        {"city": "Rome", "tags": ["a", 1]},
        {"city": "Rome", "where": {}},
        {"city": "Rome", "colour": "red"},
        {"city": None},
    ],
)
def test_arguments_that_do_not_fit_are_seen(arguments: Any) -> None:
    assert fault_of_calls(message(arguments), TOOLS) == "against_schema"


@pytest.mark.parametrize(
    ("value", "option", "equal"),
    [
        (1, 1.0, True), (0.0, 0, True), (True, True, True), (None, None, True),
        (True, 1, False), (1, True, False), (False, 0, False), (0.0, False, False),
        (None, False, False), ("1", 1, False),
        ([1, [2.0]], [1.0, [2]], True), ([1, [True]], [1, [1]], False), ([1], [1, 2], False),
        ({"a": 1, "b": [0]}, {"b": [0.0], "a": 1.0}, True), ({"a": True}, {"a": 1}, False),
        ({"a": 1}, {"b": 1}, False), ([], {}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keyword", ["enum", "const"])
def test_values_are_equal_as_json_schema_has_it(
    keyword: str, value: Any, option: Any, equal: bool
) -> None:
    rule = {"const": option} if keyword == "const" else {"enum": ["other", option]}
    tools = [{"function": {"name": "weather", "parameters": {"properties": {"v": rule}}}}]

    found = fault_of_calls(message({"v": value}), tools)

    assert found == (None if equal else "against_schema")


@pytest.mark.parametrize("depth", [20, 400])
def test_values_that_are_nested_deep_are_not_called_invalid(depth: int) -> None:
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    rule = {"properties": {"v": {"const": json.loads(json.dumps(nested))}}}
    tools = [{"function": {"name": "weather", "parameters": rule}}]

    assert fault_of_calls(message({"v": nested}), tools) is None


@pytest.mark.parametrize(
    "text", ['{"city": "Rome"', "Rome", "[]", '"Rome"', "{'city': 'Rome'}", "\ud800"]
)
def test_arguments_that_are_no_json_object_are_seen(text: str) -> None:
    assert fault_of_calls(message(text), TOOLS) == "not_json"


def test_a_tool_that_is_not_offered_is_seen() -> None:
    assert fault_of_calls(message({"city": "Rome"}, name="wetter"), TOOLS) == "unknown_tool"
    assert fault_of_calls(message({"city": "Rome"}), None) == "unknown_tool"
    assert fault_of_calls(message({"city": "Rome"}, name=None), TOOLS) == "unknown_tool"


@pytest.mark.parametrize("calls", ["x", [None], [{}], [{"function": "f"}], {"a": 1}])
def test_calls_of_another_form_are_unreadable(calls: Any) -> None:
    assert fault_of_calls({"tool_calls": calls}, TOOLS) == "unreadable"


def test_no_arguments_are_an_empty_object() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]

    assert fault_of_calls(message("", name="now"), tools) is None
    assert fault_of_calls(message(""), TOOLS) == "against_schema"


def test_a_call_that_the_server_did_not_read_is_seen_where_tools_are_offered() -> None:
    leaked = {"content": 'Let me see. <tool_call>{"name": "weather", "arguments": {"city'}

    assert fault_of_calls(leaked, TOOLS) == "not_json"
    assert fault_of_calls(leaked, None) is None
    assert fault_of_calls({"content": "Sunny."}, TOOLS) is None


def test_the_second_call_counts_too() -> None:
    both = message({"city": "Rome"})
    both["tool_calls"] += message({})["tool_calls"]

    assert fault_of_calls(both, TOOLS) == "against_schema"


def test_deep_and_wide_arguments_take_no_long_time() -> None:
    deep = "[" * 30_000 + "]" * 30_000
    wide = json.dumps({"city": "Rome", "tags": ["a"] * 10_000})
    began = time.process_time()

    assert fault_of_calls(message(f'{{"city": "x", "tags": {deep}}}'), TOOLS) == "not_json"
    assert fault_of_calls(message(wide), TOOLS) is None
    assert fault_of_calls(message('{"city": "' + "x" * 400_000 + '"}'), TOOLS) is None

    assert time.process_time() - began < 5.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(message=st.dictionaries(st.sampled_from(["content", "tool_calls"]), JSON), tools=JSON)
def test_no_json_raises(message: dict[str, Any], tools: Any) -> None:
    fault_of_calls(message, tools)


@given(schema=JSON, arguments=JSON)
def test_no_schema_raises(schema: Any, arguments: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": schema}}]
    call = {"function": {"name": "f", "arguments": arguments}}

    fault_of_calls({"tool_calls": [call]}, tools)


@pytest.mark.parametrize("depth", [2, 450, 100_000])
def test_types_that_are_nested_say_nothing(depth: int) -> None:
    kind: object = "string"
    for _ in range(depth):
        kind = [kind]
    tools = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": kind}}},
            },
        }
    ]
    assert fault_of_calls(message('{"city": "x"}'), tools) is None
