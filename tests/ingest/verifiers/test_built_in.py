"""The built-in verifiers, answer by answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingest.verifiers.built_in import (
    DEEPEST,
    Exact,
    JsonSchema,
    Length,
    NoSchemaError,
    Regex,
    ToolCalls,
    why_invalid,
)
from ingest.verifiers.checkers import MOST_BYTES, fits
from ingest.verifiers.records import Case, Failure, Finding, read_result, shown

TOOL = {
    "type": "function",
    "function": {
        "name": "refund",
        "parameters": {
            "type": "object",
            "properties": {"order": {"type": "string"}, "cents": {"type": "integer", "minimum": 0}},
            "required": ["order"],
            "additionalProperties": False,
        },
    },
}


def call(arguments: Any, name: str = "refund") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": text}}


def case(content: Any = None, *calls: Any, tokens: int | None = None, **request: Any) -> Case:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return Case(request=request, message=message, tokens=tokens)


@pytest.mark.parametrize(
    ("calls", "score", "why"),
    [
        ((call({"order": "A1"}),), 1.0, ""),
        ((call({"order": "A1"}), call({"order": "B", "cents": 5})), 1.0, ""),
        ((), 1.0, "no tool is called"),
        ((call({"order": 7}),), 0.0, "call 0: order: 7 is not of type 'string'"),
        ((call({"order": "A", "cents": -1}),), 0.0, "call 0: cents: -1 is less than the minimum"),
        ((call({}),), 0.0, "call 0: 'order' is a required property"),
        ((call({"order": "A", "to": "me"}),), 0.0, "Additional properties are not allowed"),
        ((call('{"order": "A"'),), 0.0, "call 0: its arguments are no JSON"),
        ((call('{"order": "A", "order": "B"}'),), 0.0, "an object has one name twice"),
        ((call('{"order": NaN}'),), 0.0, "NaN is no JSON"),
        ((call("[" * 100_000),), 0.0, "its arguments are no JSON: nests too deeply"),
        ((call('["A1"]'),), 0.0, "its arguments are no object"),
        ((call({"order": "A1"}, name="pay_all"),), 0.0, "call 0: no tool is named pay_all"),
        ((call({"order": "A1"}), "junk"), 0.0, "call 1: it is no call of a function"),
        (({"function": {"name": "refund", "arguments": None}},), 0.0, "arguments are no text"),
    ],
)
def test_tool_calls(calls: tuple[Any, ...], score: float, why: str) -> None:
    found = ToolCalls().verify(case("", *calls, tools=[TOOL]))

    assert found.score == score
    assert why in found.why


def test_a_call_of_a_request_without_tools_is_wrong_and_no_call_is_not_checked() -> None:
    assert ToolCalls().verify(case("", call({}))).score == 0.0
    assert ToolCalls().verify(case("hi")).score is None


@pytest.mark.parametrize(
    ("choice", "calls", "score"),
    [
        ("required", (), 0.0),
        ("auto", (), 1.0),
        ({"type": "function", "function": {"name": "refund"}}, (), 0.0),
        ({"type": "function", "function": {"name": "refund"}}, (call({"order": "A"}),), 1.0),
        ({"type": "function", "function": {"name": "other"}}, (call({"order": "A"}),), 0.0),
    ],
)
def test_a_call_that_a_request_wants(choice: Any, calls: tuple[Any, ...], score: float) -> None:
    request = {"tools": [TOOL], "tool_choice": choice}
    assert ToolCalls().verify(case("", *calls, **request)).score == score


def test_a_call_that_the_settings_ask_for() -> None:
    assert ToolCalls(required=True).verify(case("hi", tools=[TOOL])).score == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": 5},
        {"$schema": ["x"]},
        {"$schema": "http://["},
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"properties": {"a": {"pattern": "\\p{L}"}}},
        {"properties": {"a": {"pattern": "("}}},
        {"properties": {"a": {"minimum": 10**5000}}},
        {"allOf": [{"$ref": "#"}]},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_a_schema_that_cannot_be_used_is_named_and_the_call_is_still_read(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "refund", "parameters": schema}}

    found = ToolCalls().verify(case("", call({"a": 1}), tools=[tool]))
    broken = ToolCalls().verify(case("", call('{"a": '), tools=[tool]))

    assert found.score == 1.0
    assert found.why.startswith("the schema of refund cannot be used: ")
    assert broken.score == 0.0


RECURSIVE = {"$ref": "#/$defs/node", "$defs": {"node": {"anyOf": [{"items": {"$ref": "#"}}]}}}


@pytest.mark.parametrize("depth", [65, 120, 300, 900])
def test_an_answer_that_nests_deep_is_wrong_and_takes_no_gate_away(depth: int) -> None:
    text = "[" * depth + "]" * depth
    tool = {"type": "function", "function": {"name": "refund", "parameters": RECURSIVE}}

    of_call = ToolCalls().verify(case("", call('{"a": ' + text + "}"), tools=[tool]))
    of_content = JsonSchema(json_schema=RECURSIVE).verify(case(text))

    assert (of_call.score, of_content.score) == (0.0, 0.0)
    assert "deep" in of_call.why
    assert "deep" in of_content.why


def test_as_deep_as_is_allowed_is_checked_by_a_schema_that_refers_to_itself() -> None:
    text = "[" * DEEPEST + "]" * DEEPEST
    assert JsonSchema(json_schema=RECURSIVE).verify(case(text)).score == 1.0
    inner = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}
    assert JsonSchema(json_schema=inner).verify(case(text)).score == 1.0
    assert JsonSchema(json_schema=inner).verify(case(text.replace("[]", "[1]"))).score == 0.0


@pytest.mark.parametrize("price", ["19.99", "0.1", "0.07", "1e2", "4.35", "3"])
def test_prices_are_multiples_of_a_cent(price: str) -> None:
    schema = {"multipleOf": 0.01}
    assert JsonSchema(json_schema=schema).verify(case(price)).score == 1.0
    assert JsonSchema(json_schema=schema).verify(case("0.015")).score == 0.0
    assert JsonSchema(json_schema=schema).verify(case("1e999")).score == 0.0


def test_a_schema_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    monkeypatch.setattr(
        urllib.request, "urlopen", lambda *_, **__: pytest.fail("something was fetched")
    )
    with pytest.raises(NoSchemaError, match="a reference leads nowhere"):
        why_invalid({}, {"$ref": "http://127.0.0.1:9/schema.json"})


ASKED = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "required": ["total"]}},
}


@pytest.mark.parametrize(
    ("content", "asked", "score"),
    [
        ('{"total": 3}', ASKED, 1.0),
        ('{"sum": 3}', ASKED, 0.0),
        ("3 euros", ASKED, 0.0),
        ('```json\n{"total": 3}\n```', ASKED, 0.0),
        ("", ASKED, 0.0),
        ("{}", {"type": "json_object"}, 1.0),
        ("[]", {"type": "json_object"}, 0.0),
        ("hi", {"type": "text"}, None),
        ("hi", None, None),
        ("hi", "junk", None),
    ],
)
def test_json_schema_of_the_request(content: str, asked: Any, score: float | None) -> None:
    request = {} if asked is None else {"response_format": asked}
    assert JsonSchema().verify(case(content, **request)).score == score


def test_json_schema_of_the_settings_goes_before_that_of_the_request() -> None:
    verifier = JsonSchema(json_schema={"type": "array"})
    assert verifier.verify(case("[1]", response_format=ASKED)).score == 1.0
    assert verifier.verify(case('{"total": 1}', response_format=ASKED)).score == 0.0


def test_a_tool_call_is_no_malformed_json() -> None:
    request: dict[str, Any] = {"response_format": ASKED, "tools": [TOOL]}
    assert JsonSchema().verify(case(None, call({"order": "A"}), **request)).score is None


@pytest.mark.parametrize(
    ("pattern", "must", "content", "score"),
    [
        (r"\bORD-\d{6}\b", "match", "see ORD-123456.", 1.0),
        (r"\bORD-\d{6}\b", "match", "see ORD-12.", 0.0),
        (r"(?i)as an ai", "not_match", "As an AI, I", 0.0),
        (r"(?i)as an ai", "not_match", "Sure.", 1.0),
        (r"^$", "match", "", 1.0),
    ],
)
def test_regex(pattern: str, must: str, content: str, score: float) -> None:
    assert Regex(pattern=pattern, must=must).verify(case(content)).score == score


def test_a_pattern_that_backtracking_engines_never_end_with_takes_linear_time() -> None:
    import time

    started = time.process_time()
    found = Regex(pattern=r"^(a+)+$").verify(case("a" * 50_000 + "b"))

    assert found.score == 0.0
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("made", "content", "score"),
    [
        ({"texts": ("yes", "no")}, " yes\n", 1.0),
        ({"texts": ("yes", "no")}, "Yes", 0.0),
        ({"texts": ("yes", "no"), "ignore_case": True}, "YES", 1.0),
        ({"texts": ("yes",), "strip": False}, "yes ", 0.0),
        ({"metadata": "label"}, "spam", 1.0),
        ({"metadata": "label"}, "ham", 0.0),
        ({"metadata": "other"}, "spam", None),
    ],
)
def test_exact(made: dict[str, Any], content: str, score: float | None) -> None:
    assert Exact(**made).verify(case(content, metadata={"label": "spam"})).score == score


@pytest.mark.parametrize(
    ("made", "content", "tokens", "score"),
    [
        ({"max_characters": 5}, "12345", None, 1.0),
        ({"max_characters": 5}, "123456", None, 0.0),
        ({"min_characters": 1}, "", None, 0.0),
        ({"max_characters": 10, "fade": 0.5}, "x" * 12, None, 0.6),
        ({"max_characters": 10, "fade": 0.5}, "x" * 15, None, 0.0),
        ({"max_characters": 10, "fade": 0.5}, "x" * 99, None, 0.0),
        ({"max_tokens": 8}, "x", 8, 1.0),
        ({"max_tokens": 8}, "x", 9, 0.0),
        ({"max_tokens": 8}, "x", None, None),
        ({"max_tokens": 8, "min_characters": 3}, "x", 8, 0.0),
    ],
)
def test_length(
    made: dict[str, Any], content: str, tokens: int | None, score: float | None
) -> None:
    found = Length(**made).verify(case(content, tokens=tokens))
    assert found.score == (None if score is None else pytest.approx(score))


def test_parts_of_text_are_one_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert case(parts).content == "a\nb"


@pytest.mark.parametrize("score", [1.5, -0.1, float("nan"), float("inf"), 10**400, "1", [1]])
def test_what_is_no_score_in_range_is_a_failure(score: Any) -> None:
    found = read_result(score)
    assert isinstance(found, Failure)
    assert found.reason == "bad_finding"


def test_a_truth_is_a_score() -> None:
    assert [read_result(one) for one in (True, False, None, 1)] == [
        Finding(score=1.0),
        Finding(score=0.0),
        Finding(score=None),
        Finding(score=1.0),
    ]


def test_what_a_verifier_says_is_one_short_line_without_control_characters() -> None:
    said = shown("a\x1b[31m\nb\ud800\x00" + "x" * 1_000)

    assert len(said) == 300
    assert said.startswith("a [31m b")
    assert said.encode()


# Texts and schemas of strangers: what does not fit is found, and nothing takes long.

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{"name": "Ada"}', True),
        ('{"age": 36}', False),
        ('{"name": 5}', False),
        ('{"name": "Ada", "age": -1}', False),
        ('{"name": "Ada", "more": 1}', False),
        ("I cannot do that", False),
        ('{"name": "Ada"', False),
        ("", False),
    ],
)
def test_a_text_fits_its_schema_or_not(text: str, expected: bool) -> None:
    assert fits(text, PERSON) is expected


def exponential() -> dict[str, Any]:
    """Each level asks the next one twice."""
    defs: dict[str, Any] = {
        f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(40)
    }
    return {"$defs": {**defs, "l40": {"type": "string"}}, "$ref": "#/$defs/l0"}


@pytest.mark.parametrize(
    "schema",
    [
        exponential(),
        {"pattern": "(a+)+$"},
        {"patternProperties": {"(a+)+$": {"type": "string"}}, "additionalProperties": False},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"type": "nothing that is known"},
        {"$schema": 5},
        "no schema",
        5,
        None,
        {"enum": ["x" * MOST_BYTES]},
    ],
)
@pytest.mark.parametrize("text", [json.dumps("a" * 5_000 + "!"), json.dumps({"a" * 50 + "!": 1})])
def test_what_nobody_can_tell_in_time_counts_as_fitting(schema: Any, text: str) -> None:
    assert fits(text, schema) is True


def test_many_equal_items_take_no_square_of_the_time() -> None:
    text = json.dumps([[]] * 20_000)

    assert fits(text, {"uniqueItems": True}) is True


def test_a_text_over_the_limit_is_not_looked_at() -> None:
    assert fits("x" * (MOST_BYTES + 1), PERSON) is True
