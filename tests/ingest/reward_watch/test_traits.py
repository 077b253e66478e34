"""The traits of one answer: each with one that has it and one that just has not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ingest.reward_watch import traits
from ingest.reward_watch.traits import (
    KINDS,
    LOOPS,
    TAIL,
    Traits,
    fault_of_calls,
    is_clarifying,
    is_refusal,
    needs_tools,
    repeated_share,
    traits_of,
)

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


# Tool calls against the tools of the request.

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
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def calling(arguments: Any, name: Any = "weather") -> dict[str, Any]:
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
    assert fault_of_calls(calling(arguments), WEATHER) is None


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
    assert fault_of_calls(calling(arguments), WEATHER) == "against_schema"


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
def test_values_equal_as_in_json_schema(keyword: str, value: Any, option: Any, equal: bool) -> None:
    rule = {"const": option} if keyword == "const" else {"enum": ["other", option]}
    tools = [{"function": {"name": "weather", "parameters": {"properties": {"v": rule}}}}]

    found = fault_of_calls(calling({"v": value}), tools)

    assert found == (None if equal else "against_schema")


@pytest.mark.parametrize("depth", [20, 400])
def test_values_that_are_nested_deep_are_not_called_invalid(depth: int) -> None:
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    rule = {"properties": {"v": {"const": json.loads(json.dumps(nested))}}}
    tools = [{"function": {"name": "weather", "parameters": rule}}]

    assert fault_of_calls(calling({"v": nested}), tools) is None


@pytest.mark.parametrize(
    "text", ['{"city": "Rome"', "Rome", "[]", '"Rome"', "{'city': 'Rome'}", "\ud800"]
)
def test_arguments_that_are_no_json_object_are_seen(text: str) -> None:
    assert fault_of_calls(calling(text), WEATHER) == "not_json"


def test_a_tool_that_is_not_offered_is_seen() -> None:
    assert fault_of_calls(calling({"city": "Rome"}, name="wetter"), WEATHER) == "unknown_tool"
    assert fault_of_calls(calling({"city": "Rome"}), None) == "unknown_tool"
    assert fault_of_calls(calling({"city": "Rome"}, name=None), WEATHER) == "unknown_tool"


@pytest.mark.parametrize("calls", ["x", [None], [{}], [{"function": "f"}], {"a": 1}])
def test_calls_of_another_form_are_unreadable(calls: Any) -> None:
    assert fault_of_calls({"tool_calls": calls}, WEATHER) == "unreadable"


def test_no_arguments_are_an_empty_object() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]

    assert fault_of_calls(calling("", name="now"), tools) is None
    assert fault_of_calls(calling(""), WEATHER) == "against_schema"


def test_a_call_that_the_server_did_not_read_is_seen_where_tools_are_offered() -> None:
    leaked = {"content": 'Let me see. <tool_call>{"name": "weather", "arguments": {"city'}

    assert fault_of_calls(leaked, WEATHER) == "not_json"
    assert fault_of_calls(leaked, None) is None
    assert fault_of_calls({"content": "Sunny."}, WEATHER) is None


def test_the_second_call_counts_too() -> None:
    both = calling({"city": "Rome"})
    both["tool_calls"] += calling({})["tool_calls"]

    assert fault_of_calls(both, WEATHER) == "against_schema"


def test_deep_and_wide_arguments_take_no_long_time() -> None:
    deep = "[" * 30_000 + "]" * 30_000
    wide = json.dumps({"city": "Rome", "tags": ["a"] * 10_000})
    began = time.process_time()

    assert fault_of_calls(calling(f'{{"city": "x", "tags": {deep}}}'), WEATHER) == "not_json"
    assert fault_of_calls(calling(wide), WEATHER) is None
    assert fault_of_calls(calling('{"city": "' + "x" * 400_000 + '"}'), WEATHER) is None

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
    assert fault_of_calls(calling('{"city": "x"}'), tools) is None


# Loops at the end of an answer, and texts that repeat themselves for a reason.

LOOPED = {
    "a sentence": "I am sorry for that. " * 60,
    "a word": "the " * 1_000,
    "two lines": "Let me check the order again.\nThe order is being checked.\n" * 30,
    "chinese": "对不起，我再看一下。" * 80,
    "numbered": "".join(f"{i}. Check the logs of the server and restart it.\n" for i in range(60)),
    "a thought": "Wait, but the answer might be 12. Let me compute again: 3*4=12. " * 25,
    "after a sound beginning": Path(traits.__file__).read_text() + "and then " * 400,
    "a paragraph": "The customer asks for a refund, and the policy says that refunds take thirty "
    "days, so the agent has to look up the date of the order in the table. " * 14,
}
FINE = {
    "a table": "".join(
        f"| {i} | item {Random(i).choice(['lamp', 'chair', 'desk', 'sofa'])} {i * 7 % 13} | "
        f"{i * 13 % 97}.{i * 7 % 100:02d} EUR |\n"
        for i in range(60)
    ),
    "json": json.dumps(
        [
            {"id": i, "name": f"user{i * 37 % 101}", "email": f"user{i * 37 % 101}@example.org"}
            for i in range(40)
        ]
    ),
    "code": Path(__file__).read_text(),
    "sql": "".join(
        f"INSERT INTO price (sku, eur) VALUES ('{i * 7919 % 9973:05d}', {i * 31 % 89}.{i % 100});\n"
        for i in range(50)
    ),
    "a refrain": "\n".join(
        f"{line}\nAnd the river runs on, and the river runs on.\n"
        for line in (
            "The mill has stopped, the miller gone",
            "The corn is high, the day is long",
            "A boat went by without a song",
            "The bridge was built when I was young",
            "They sold the field beside the pond",
            "The church has lost its second bell",
            "My father knew these waters well",
            "The frost came early to the dell",
        )
    ),
    "short": "no no no no no no no no no no",
}


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_is_seen(name: str) -> None:
    assert repeated_share(LOOPED[name]) >= LOOPS + 0.05


@pytest.mark.parametrize("name", FINE)
def test_a_text_that_repeats_for_a_reason_is_no_loop(name: str) -> None:
    assert repeated_share(FINE[name]) <= LOOPS - 0.05


def test_only_the_end_counts() -> None:
    rng = Random(1)
    sound = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(TAIL))

    assert repeated_share("loop " * 10_000 + sound) == repeated_share(sound)


def test_the_share_of_a_period_is_what_is_left_of_it() -> None:
    text = ("".join(chr(0x4E00 + i) for i in range(100))) * 20  # 2,000 characters, period 100

    assert repeated_share(text) == 1 - 100 / (2_000 - 16 + 1)


# Refusals and clarifying questions: figures on labelled answers, and the bounds of the work.

# Labels made by hand, whatever the detectors say. Half of each kind (every second one) was not
# looked at while the phrases were written; there are no phrases for other languages.
ANSWERS = [
    json.loads(line)
    for line in Path(__file__).with_name("labelled_answers.jsonl").read_text("utf-8").splitlines()
]
LABELLED = [(one["text"], one["label"]) for one in ANSWERS if "other_language" not in one]
OTHER_LANGUAGES = [(one["text"], one["label"]) for one in ANSWERS if "other_language" in one]


def label(text: str) -> str:
    if is_refusal(text):
        return "refusal"
    return "clarifying" if is_clarifying(text) else "neither"


def figures(kind: str, half: slice) -> tuple[int, int, int]:
    """Return true positives, false positives and false negatives of a kind."""
    pairs = [(label(text), right) for text, right in LABELLED[half]]
    return (
        sum(found == kind == right for found, right in pairs),
        sum(found == kind != right for found, right in pairs),
        sum(found != kind == right for found, right in pairs),
    )


def test_the_figures_of_the_docs_hold_on_both_halves() -> None:
    seen, unseen = slice(0, None, 2), slice(1, None, 2)

    assert figures("refusal", seen) == (20, 0, 0)
    assert figures("clarifying", seen) == (19, 0, 1)
    assert figures("refusal", unseen) == (20, 0, 0)
    assert figures("clarifying", unseen) == (20, 1, 0)


def test_a_long_answer_that_begins_with_a_refusal_has_more_to_say() -> None:
    short = "I can't access the internet to provide live data."

    assert not is_refusal(short + " From the text that you gave: the price is 12." * 40)


def test_in_other_languages_questions_are_seen_and_refusals_are_not() -> None:
    for text, right in OTHER_LANGUAGES:
        assert label(text) == (right if right == "clarifying" else "neither"), text


def test_a_text_of_marks_alone_is_no_refusal() -> None:
    assert not any(map(is_refusal, ["", " ", "\n\n", "?", "...", '"', "> ", "```"]))


REPEATED = (
    "as an ai ",
    "to help ",
    "i understand but ",
    "before i ",
    "so i can ",
    "i apologize for ",
    "unfortunately ",
    "i'm sorry but about that ",
    "sure and ",
    "(",
)


def test_repeated_phrases_take_linear_time() -> None:
    """Python's own matcher needs 2^n steps for n of these: 25 of them took minutes."""
    program = (
        "import sys; from ingest.reward_watch.traits import is_clarifying, is_refusal;"
        "[f((p * 100_000)[:n] + mark) for p in sys.argv[1:] for f in (is_clarifying, is_refusal)"
        " for mark in ('', '?') for n in (200, 600, 1200, 2000, 100_000)]"
    )
    subprocess.run([sys.executable, "-c", program, *REPEATED], check=True, timeout=60)
