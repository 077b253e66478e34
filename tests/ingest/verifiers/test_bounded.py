"""Texts and schemas of strangers: what does not fit is found, and nothing takes long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingest.verifiers.checkers import MOST_BYTES, fits

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
