"""The traits of one answer, each with one that has it and one that just has not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from ingest.reward_watch.traits import KINDS, Traits, needs_tools, traits_of

CALL = {"function": {"name": "look", "arguments": "{}"}}
TOOLS = [{"function": {"name": "look"}}]


def found(content: Any = None, finish_reason: str | None = "stop", **fields: Any) -> set[str]:
    message = json.dumps({"role": "assistant", "content": content, **fields}).encode()
    traits = traits_of(message, finish_reason=finish_reason, tools=TOOLS)
    return {kind for kind in KINDS if getattr(traits, kind)}


def test_each_kind_has_a_field() -> None:
    assert set(KINDS) == set(Traits.__dataclass_fields__)


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        ("Paris.", set()),
        ("I'm sorry, but I can't help with that.", {"refusal"}),
        ("Which city do you mean?", {"clarifying"}),
        ("", {"empty"}),
        (" \n", {"empty"}),
        (None, {"empty"}),
        ([], {"empty"}),
        ([{"type": "text", "text": "Which one?"}], {"clarifying"}),
        ("and so on " * 200, {"repetition"}),
        ("<tool_call>{", {"invalid_call"}),
    ],
)
def test_what_an_answer_says(content: Any, kinds: set[str]) -> None:
    assert found(content) == kinds


def test_the_token_limit_cuts() -> None:
    assert found("Paris is", "length") == {"cut"}
    assert found("", "length") == {"cut", "empty"}


def test_an_answer_that_calls_is_neither_empty_nor_a_refusal() -> None:
    assert found(None, "tool_calls", tool_calls=[CALL]) == set()
    assert found("I can't do that, so I look.", tool_calls=[CALL]) == set()
    assert found("", tool_calls=[{"function": {"name": "gone", "arguments": "{}"}}]) == {
        "invalid_call"
    }


@pytest.mark.parametrize("message", [b"", b"[]", b"{", b"null", b"\xff", b"[" * 100_000])
def test_a_message_that_cannot_be_read_is_told(message: bytes) -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        traits_of(message, finish_reason="stop", tools=None)


def test_tools_are_needed_only_where_a_call_may_be() -> None:
    assert needs_tools(json.dumps({"tool_calls": [CALL]}).encode())
    assert needs_tools(b'{"content": "<tool_call>"}')
    assert not needs_tools(b'{"content": "Paris."}')


@pytest.mark.parametrize(
    "content",
    [
        "I'm sorry, but " * 30_000,
        "word " * 100_000,
        "".join(f"{i} " for i in range(100_000)),
        "?\n" * 200_000,
        "`" * 400_000,
        '"' * 400_000,
        " " * 400_000,
    ],
)
def test_an_answer_of_100_000_tokens_takes_a_bounded_time(content: str) -> None:
    message = json.dumps({"role": "assistant", "content": content}).encode()
    began = time.process_time()

    traits_of(message, finish_reason="stop", tools=TOOLS)

    assert time.process_time() - began < 5.0
