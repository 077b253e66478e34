"""The canonical form of messages, on all surfaces; nothing that a client writes raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ingest.sessions.messages import (
    Arrival,
    JsonObject,
    Message,
    digest_of,
    read_conversation,
    read_reply,
)
from ingest.sessions.rows import NOTHING, arrival_of
from ingest.sessions.search import ENTRY_BYTES, Memory, RequestReader
from ingest.sessions.tree import SessionTree
from sidecar.records import Choice
from support.ingest_kit import make_exchange

CALL = {"name": "find", "arguments": '{"b": 1, "a": [2, 3]}'}
CHAT: JsonObject = {
    "messages": [
        {"role": "system", "content": "Be  brief."},
        {"role": "user", "content": "Find  it,\n please."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ],
    "tools": [{"type": "function", "function": {"name": "find"}}],
}
RESPONSES: JsonObject = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Find it, please."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "call_1", **CALL},
        {"type": "function_call_output", "call_id": "call_1", "output": "found"},
    ],
    "tools": [{"type": "function", "name": "find"}],
}
MESSAGES: JsonObject = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Find it, please."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {
                    "type": "tool_use",
                    "id": "call_1",
                    "name": "find",
                    "input": {"a": [2, 3], "b": 1},
                },
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "found"}],
        },
    ],
    "tools": [{"name": "find", "input_schema": {}}],
}


@pytest.mark.parametrize("request_body", [CHAT, RESPONSES, MESSAGES])
def test_a_conversation_is_the_same_on_every_surface(request_body: JsonObject) -> None:
    found = read_conversation(request_body)

    assert found.messages == (
        Message("user", "Find it, please."),
        Message("assistant", "", (("find", '{"a":[2,3],"b":1}'),), ("call_1",)),
        Message("tool", "found"),
    )
    assert (found.system, found.tools) == ("Be brief.", ("find",))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "It is done."}, {"content": [{"type": "text", "text": " It is\ndone. "}]}),
        ({"content": ""}, {"content": None}),
        ({"content": "Yes"}, {"content": "<think>Hm, so</think>\n\nYes"}),
        ({"content": "Yes", "reasoning_content": "Hm"}, {"content": "Yes"}),
        (
            {"content": "", "tool_calls": [{"id": "a", "function": CALL}]},
            {"content": None, "tool_calls": [{"id": "b", "function": {**CALL, "x": 1}}]},
        ),
    ],
)
def test_what_clients_change_is_not_significant(one: JsonObject, other: JsonObject) -> None:
    assert read_reply(one).digest() == read_reply(other).digest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "Yes"}, {"content": "No"}),
        ({"content": "find {}"}, {"tool_calls": [{"function": {"name": "find"}}]}),
        (
            {"tool_calls": [{"function": CALL}]},
            {"tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]},
        ),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "data:1"}}]},
            {"content": [{"type": "image_url", "image_url": {"url": "data:2"}}]},
        ),
    ],
)
def test_what_differs_in_content_has_another_digest(one: JsonObject, other: JsonObject) -> None:
    assert read_reply(one).digest() != read_reply(other).digest()


def arrival(request: bytes, *replies: bytes) -> Arrival:
    choices = tuple(Choice(index=index, message=reply) for index, reply in enumerate(replies))
    return arrival_of(make_exchange("x", request=request, choices=choices))


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("key", ["messages", "input", "system", "tools", "content"])
def test_deep_nesting_costs_only_the_request_itself(key: str, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    wrapped = b'{"messages":[{"role":"user","content":%b}]}' % deep
    body = wrapped if key == "content" else b'{"%b":%b}' % (key.encode(), deep)
    found = arrival(body, b'{"content":%b}' % deep)

    (place,) = SessionTree().place(found, now=1.0)
    assert place.how == "root"


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"null", b"{", b'"text"', b"1"])
def test_what_is_no_json_object_repeats_nothing(body: bytes) -> None:
    assert arrival(body, body).conversation == NOTHING
    assert arrival(body, body).replies == ()


CONTAINERS = ["messages", "input", "prompt", "system", "instructions", "tools", "functions"]
FIELDS = ["role", "content", "type", "text", "name", "arguments", "refusal", "output", "function"]
CALLS = ["tool_calls", "function_call", "id", "call_id", "tool_use_id"]
KEYS = st.sampled_from([*CONTAINERS, *FIELDS, *CALLS])
ROLES = ["user", "assistant", "system", "developer", "tool", "function"]
TYPES = ["text", "input_text", "tool_use", "tool_result", "function_call_output", "thinking"]
WORDS = st.sampled_from([*ROLES, *TYPES, "function_call", "reasoning", "{}", "\ud800"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


SHARED = RequestReader(max_bytes=20_000)


@settings(max_examples=120)
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.lists(VALUES, max_size=2))
def test_no_json_raises(request_body: dict[str, Any], replies: list[Any]) -> None:
    tree = SessionTree()
    exchange = make_exchange(
        "x",
        request=json.dumps(request_body).encode(),
        choices=tuple(
            Choice(index=index, message=json.dumps(reply).encode())
            for index, reply in enumerate(replies)
        ),
    )
    for _ in range(2):  # what is read first, and what is remembered
        assert arrival_of(exchange, SHARED) == arrival_of(exchange)
    for number in range(3):
        found = arrival(
            json.dumps(request_body).encode(), *(json.dumps(x).encode() for x in replies)
        )
        tree.place(
            Arrival(
                **{
                    **{name: getattr(found, name) for name in Arrival.__dataclass_fields__},
                    "exchange_id": str(number),
                }
            ),
            now=float(number),
        )

    assert len(tree) == 3


def test_each_part_is_read_once_while_it_is_remembered() -> None:
    read: list[Any] = []

    def words(value: Any) -> list[str]:
        read.append(value)
        return [str(value)]

    memory = Memory(words, len, max_bytes=3 * (ENTRY_BYTES + 10))
    long = json.dumps("x" * 5_000).encode()
    for part in (b"1", b"2", b"1", b"3", b"1", b"4", b"1", b"2"):
        assert memory(part) == (part.decode(),)
    assert memory(long) == ("x" * 5_000,)
    assert read == [1, 2, 3, 4, 2, "x" * 5_000]  # "2" was used least recently when "4" came
    assert memory(b"1") == ("1",)
    assert read[-1] == 1, "the long part is over the limit alone, and takes the place of all"


def test_work_grows_with_what_an_assistant_says(monkeypatch: pytest.MonkeyPatch) -> None:
    digested = 0

    def counted(text: str) -> bytes:
        nonlocal digested
        digested += len(text)
        return digest_of(text)

    monkeypatch.setattr("ingest.sessions.messages.digest_of", counted)
    said = [{"role": "assistant", "content": "x" * 100} for _ in range(2_000)]

    (message,) = read_conversation({"messages": said}).messages

    assert message.text == " ".join(["x" * 100] * 2_000)
    assert digested < 3 * len(message.text)
