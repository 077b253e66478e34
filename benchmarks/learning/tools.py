"""The task `tools`: one call of one tool, from bfcl-eval's simple cases. Pure but for the reading.

The reward climbs by how far a call gets: 0.2 for a call that can be read, 0.4 with a name and
arguments, 0.6 with the tool's own name, 0.8 with arguments that fit its schema, 1 with those that
the data set expects.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.tasks import Message, Prompt, Task
from ingest.verifiers.built_in import NoSchemaError, why_invalid

DATA: Final = Path(__file__).resolve().parents[2] / ".bench/peers/bfcl/bfcl_eval/data"
FILE: Final = "BFCL_v4_simple_python.json"
TRAIN, EXAM = 64, 32
MOST_CHARACTERS: Final = 900
"""Longest tool definition that is taken: the model reads 2,048 tokens, slowly."""
KINDS: Final = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""The data set's names of types -> JSON schema's."""

EXAMPLE: Final = (
    {"role": "system", "content": "Answer with one call of your tool, and nothing else."},
    {"role": "user", "content": "How warm is it in Oslo?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "temperature", "arguments": {"city": "Oslo"}}</tool_call>',
    },
)
"""Without it the shipped model of 135M parameters never wrote a call that could be read."""


class NoDataError(Exception):
    """bfcl-eval is not there; the message says what to do."""


def tools() -> Task:
    """64 cases to learn from and 32 others for the exam. Raises: NoDataError."""
    try:
        cases = [json.loads(line) for line in (DATA / FILE).read_text().splitlines()]
        answers = (DATA / "possible_answer" / FILE).read_text().splitlines()
    except OSError as error:
        raise NoDataError(f"{error}; run benchmarks/learning/setup") from error
    truths = {one["id"]: one["ground_truth"][0] for one in map(json.loads, answers)}
    short = [one for one in cases if len(json.dumps(one["function"])) <= MOST_CHARACTERS]
    drawn = random.Random(5).sample(short, TRAIN + EXAM)
    prompts = tuple(_prompt(case, truths[case["id"]]) for case in drawn)
    return Task(
        name="tools",
        train=prompts[:TRAIN],
        exam=prompts[TRAIN:],
        max_tokens=64,
        passes_means="the expected call",
    )


def _prompt(case: Mapping[str, Any], truth: Mapping[str, Any]) -> Prompt:
    function = json_schema(case["function"][0])
    messages = [*EXAMPLE, *(dict(one) for one in case["question"][0])]

    def reward(message: Message) -> float:
        return worth(message, function, truth)

    return Prompt(
        id=case["id"],
        chat={"messages": messages, "tools": [{"type": "function", "function": function}]},
        reward=reward,
        passes=lambda message: reward(message) == 1.0,
    )


def json_schema(value: Any) -> Any:  # Any: JSON
    """Return a definition of the data set with JSON schema's names of types."""
    if isinstance(value, list):
        return [json_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {key: json_schema(one) for key, one in value.items()}
    if isinstance(kind := made.get("type"), str) and kind in KINDS:
        if (named := KINDS[kind]) is None:
            del made["type"]
        else:
            made["type"] = named
    return made


def worth(message: Message, function: Mapping[str, Any], truth: Mapping[str, Any]) -> float:
    """Return the reward of a message, 0..1. truth: name -> argument -> the values it may have."""
    call = read_call(message)
    if call is None:
        return 0.0
    name, given = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not isinstance(given, dict):
        return 0.2
    if name != function["name"]:
        return 0.4
    try:
        fits = why_invalid(given, function["parameters"]) is None
    except NoSchemaError:
        fits = True
    if not fits or set(given) - set(function["parameters"].get("properties", {})):
        return 0.6
    (expected,) = truth.values()
    right = all(
        given[argument] in allowed if argument in given else "" in allowed
        for argument, allowed in expected.items()
    )
    return 1.0 if right else 0.8


def read_call(message: Message) -> dict[str, Any] | None:
    """Return the first call as {name, arguments}, parsed by vLLM or written as text; else None."""
    for call in message.get("tool_calls") or ():
        said = call.get("function", {})
        try:
            return {"name": said.get("name"), "arguments": json.loads(said.get("arguments") or "")}
        except ValueError:
            return {"name": said.get("name")}
    text = str(message.get("content") or "")
    found = re.search(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)
    try:
        value = json.loads(found[1] if found else text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
