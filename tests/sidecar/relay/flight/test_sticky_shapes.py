"""What real clients change from turn to turn: the session key, the arm and the replica stay."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sidecar.relay.heads import RequestHeaders
from sidecar.relay.peek import HALF_TEXT_BYTES, MARKS_KEPT, PROMPT_KEY_BYTES, peek_request
from sidecar.relay.plan import Plan, plan_request
from sidecar.relay.replicas import Replica, Replicas
from sidecar.relay.surfaces import BY_PATH
from sidecar.relay.upstream import endpoint
from sidecar.routing.assignment import CompiledRouting
from sidecar.routing.session_key import KnownSessions
from sidecar.routing.table import RoutingTable

TURNS = 12
UUID = "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"
TABLE = CompiledRouting(
    RoutingTable(model="m", champion="m--v1", canary="m--v2", canary_weight_bp=5_000, salt="s")
)
Message = dict[str, Any]
Sent = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers of a request."""


def asks(text: object) -> Message:
    return {"role": "user", "content": text}


def part(text: str, **more: object) -> Message:
    return {"type": "text", "text": text, **more}


def plan(
    path: str, body: bytes, headers: Mapping[str, str], known: KnownSessions, **around: Any
) -> Plan:
    read = RequestHeaders()
    for name, value in headers.items():
        if name.startswith("x-sidecar-"):
            read.aside[name.encode()] = value.encode()
        else:
            read.read_session(name.encode(), value.encode())
    found = plan_request(BY_PATH[path.encode()], body, read, TABLE, known, **around)
    assert isinstance(found, Plan)
    return found


def key_of(sent: Sent, known: KnownSessions | None = None, **around: Any) -> str:
    path, body, headers = sent
    data = json.dumps(body).encode()
    return plan(path, data, headers, known or KnownSessions(), **around).session_key


def chat(*messages: Message, headers: Mapping[str, str] = {}, **more: object) -> Sent:
    return "/v1/chat/completions", {"model": "m", "messages": [*messages], **more}, {**headers}


def anthropic(system: object, messages: list[Message], **more: object) -> Sent:
    body = {"model": "m", "max_tokens": 9, "system": system, "messages": messages, **more}
    return "/v1/messages", body, {}


def history(turn: int, first: object = "Help me with my order 4711.") -> list[Message]:
    """The messages of a conversation before the reply of this turn."""
    found = [asks(first)]
    for number in range(turn):
        found += [{"role": "assistant", "content": f"reply {number}"}, asks(f"go on {number}")]
    return found


def reminder(turn: int) -> str:
    return f"<system-reminder>\nToday's date is 2026-11-{turn + 1:02}.\n</system-reminder>"


def clock(turn: int) -> str:
    return f"You are an agent. It is {turn + 8}:{turn * 5 % 60:02}:{turn:02}."


def newest_only(turn: int) -> Sent:
    """The time stands in the newest message alone."""
    messages = history(turn)
    messages[-1] = asks(f"{messages[-1]['content']}\n\nCurrent time: 2026-11-27T10:{turn:02}:00Z")
    return chat(*messages)


def todo_at_the_end(turn: int) -> Sent:
    messages = history(turn, [part(reminder(turn)), part("fix the bug")])
    messages.append(asks(f"<system-reminder>{turn} tasks are open</system-reminder>"))
    return anthropic("You are.", messages)


def codex(turn: int) -> Sent:
    item = {"type": "message", "role": "user"}
    environment = f"<environment_context><cwd>/srv/{turn}</cwd></environment_context>"
    made: list[Message] = [
        {**item, "role": "developer", "content": [{"type": "input_text", "text": clock(turn)}]},
        {**item, "content": [{"type": "input_text", "text": environment}]},
        {**item, "content": [{"type": "input_text", "text": "fix the bug"}]},
    ]
    for number in range(turn):
        call = {"call_id": f"c{turn}-{number}", "id": f"fc_{turn}_{number}"}
        made += [
            {"type": "reasoning", "id": f"rs_{turn}"},
            {"type": "function_call", "name": "sh", "arguments": "{}", **call},
            {"type": "function_call_output", "output": "ok", **call},
        ]
    return "/v1/responses", {"model": "m", "instructions": clock(turn), "input": made}, {}


def shortened(turn: int, **names: Any) -> Sent:
    """The client keeps the last messages alone: only a name tells the conversation."""
    return chat(*history(turn)[-3:], **names)


SHAPES: dict[str, Callable[[int], Sent]] = {
    "clock in the system prompt": lambda t: chat(
        {"role": "system", "content": clock(t)}, *history(t)
    ),
    "system prompt in the first user message": lambda t: chat(
        *history(t, f"{clock(t)} You have {9_000 - t} tokens left.\n\nHelp me with my order.")
    ),
    "reminder behind the newest message": todo_at_the_end,
    "time in the newest message": newest_only,
    "white space": lambda t: chat(*history(t, "Help  me\n" if t % 2 else " Help me")),
    "environment and call ids (Codex)": codex,
    "input as text": lambda t: (
        "/v1/responses",
        {"model": "m", "instructions": clock(t), "input": f"It is 10:{t:02}. Help me."},
        {},
    ),
    "x-session-id": lambda t: shortened(t, headers={"x-session-id": "s-1"}),
    "x-sidecar-session": lambda t: shortened(t, headers={"x-sidecar-session": "s-1"}),
    "session in metadata.user_id": lambda t: shortened(
        t, metadata={"user_id": f"user_0a_account_1b_session_{UUID}"}
    ),
    "prompt_cache_key": lambda t: shortened(t, prompt_cache_key=UUID),
    "Open WebUI": lambda t: shortened(t, headers={"x-openwebui-chat-id": UUID}),
    "LiteLLM": lambda t: shortened(t, litellm_session_id="run-7"),
    "a vendor's header": lambda t: shortened(t, headers={"x-acme-session-id": "run-7"}),
    "conversation of responses": lambda t: (
        "/v1/responses",
        {"model": "m", "conversation": {"id": "conv_1"}, "input": f"go on {t}"},
        {},
    ),
    "sub-agents (opencode)": lambda t: chat(
        asks(f"task of agent {t}"),
        headers={"x-session-id": f"ses_{t}", "x-parent-session-id": "ses_p"}
        if t
        else {"x-session-id": "ses_p"},
    ),
    "sub-agents (Codex)": lambda t: chat(
        asks(f"task of agent {t}"),
        headers={"session-id": f"t{t}", "x-codex-parent-thread-id": "t0"}
        if t
        else {"session-id": "t0"},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_turn_of_a_conversation_meets_another_arm_or_replica(shape: str) -> None:
    known = KnownSessions()
    replicas = Replicas(
        [Replica(endpoint(f"http://127.0.0.1:{port}"), connect_timeout_s=1.0) for port in (1, 2)]
    )

    keys = [key_of(SHAPES[shape](turn), known) for turn in range(TURNS)]
    alone = [key_of(SHAPES[shape](turn)) for turn in range(TURNS)]

    assert len(set(keys)) == 1
    assert alone == keys, "the same in another worker, and after a restart"
    assert len({TABLE.routes(key) for key in keys}) == 1
    assert len({replicas.choose("m", key, (), 0.0) for key in keys}) == 1


def test_conversations_of_one_agent_are_spread_over_arms_and_replicas() -> None:
    known = KnownSessions()
    keys = [
        key_of(
            anthropic(clock(number), history(3, [part(reminder(1)), part(f"Order {number}")])),
            known,
        )
        for number in range(200)
    ]

    assert len(set(keys)) == 200
    assert 70 < sum(TABLE.routes(key)[0].arm == "canary" for key in keys) < 130


@pytest.mark.parametrize(
    "shared",
    [
        {"prompt_cache_key": "support-bot"},
        {"prompt_cache_key": UUID},
        {"headers": {"x-session-id": "support-bot"}},
        {"headers": {"x-session-affinity": UUID}},
        {"session_id": "support-bot"},
        {"metadata": {"session_id": UUID}},
    ],
)
def test_a_name_that_an_application_gives_to_all_its_conversations_merges_few(
    shared: dict[str, Any],
) -> None:
    known = KnownSessions()
    sent = [chat(asks(f"question {number}"), **shared) for number in range(300)]

    keys = [key_of(one, known) for one in sent]
    again = [key_of(one, known) for one in sent]

    assert len(set(keys)) >= 300 - 8 + 1
    assert len(set(again)) == 300


def test_the_users_name_holds_no_session() -> None:
    one, other = (
        chat(asks("hi"), metadata={"user_id": f"user_0a_account_1b_session_{session}"})
        for session in (UUID, UUID[::-1])
    )
    plans = [
        plan(path, json.dumps(body).encode(), {}, KnownSessions()) for path, body, _ in (one, other)
    ]

    assert [found.user for found in plans] == ["user_0a_account_1b"] * 2
    assert len({found.session_key for found in plans}) == 2


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200)


def told(words: str) -> bool:
    return bool(words.strip())


@given(
    first=TEXTS.filter(told),
    turn=st.integers(0, 3),
    other=st.integers(0, 3),
    system=TEXTS,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
    as_parts=st.booleans(),
    cached=st.booleans(),
    extra=st.dictionaries(st.sampled_from(["name", "id", "cache_control"]), TEXTS),
)
def test_no_detail_of_transport_changes_the_key(
    first: str,
    turn: int,
    other: int,
    system: str,
    ascii_only: bool,
    indent: int | None,
    as_parts: bool,
    cached: bool,
    extra: dict[str, str],
) -> None:
    plain = chat(*history(turn, first))
    marked = {"cache_control": {"type": "ephemeral"}} if cached else {}
    content = [part(first, **marked)] if as_parts else first
    opened = {**extra, **asks(content)}
    varied = chat({"role": "system", "content": system}, opened, *history(other)[1:], seed=turn)
    body = json.dumps(varied[1], ensure_ascii=ascii_only, indent=indent).encode()

    assert plan(varied[0], body, {}, KnownSessions()).session_key == key_of(plain)


# -- what the body says on each surface


def shown(url: bytes) -> bytes:
    content = b'[{"type":"image_url","image_url":{"url":"%b"}}]' % url
    return b'{"messages":[{"role":"user","content":%b}]}' % content


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b'{"messages":[1]}', b'{"messages":{"role":"user"}}', True),
        (b"{}", b'{"messages":[]}', True),
        (b'{"input":"u"}', b'{"input":[{"role":"user","content":"u"}]}', True),
        (b'{"prompt":"p"}', b'{"prompt":"q"}', False),
        (b'{"prompt":[1,2]}', b'{"prompt":[1,3]}', False),
        # Read by Python's json
        (
            b'{"temperature":NaN,"messages":[{"role":"user","content":"u"}]}',
            b'{"messages":[{"role":"user","content":"u"}]}',
            True,
        ),
        (
            b'{"messages":[{"role":"user","content":"\\ud800"}]}',
            b'{"messages":[{"role":"user","content":"\\ud801"}]}',
            False,
        ),
        # Nothing but a system prompt names the conversation.
        (
            b'{"messages":[{"role":"system","content":"a"}]}',
            b'{"messages":[{"role":"system","content":"b"}]}',
            False,
        ),
        (b'{"system":"a","messages":[]}', b'{"system":"b","messages":[]}', False),
        # Pictures count, wherever the client marks its cache.
        (shown(b"a"), shown(b"b"), False),
        # An address that is signed anew, and one whose query says what it shows.
        (shown(b"https://s3/a.png?X-Amz-Signature=ab"), shown(b"https://s3/a.png?sig=cd"), True),
        (shown(b"https://a/show?id=1"), shown(b"https://a/show?id=2"), False),
        (
            b'{"messages":[{"role":"user","content":[{"type":"image","source":{"data":"a"}}]}]}',
            b'{"messages":[{"role":"user","content":'
            b'[{"cache_control":{},"type":"image","source":{"data":"a"}}]}]}',
            True,
        ),
    ],
)
def test_openings_of_bodies(one: bytes, other: bytes, same: bool) -> None:
    assert (peek_request(one).opening({}) == peek_request(other).opening({})) is same


def test_a_long_message_is_read_at_both_ends_in_any_encoding() -> None:
    def opened(text: str, *, ascii_only: bool = False) -> tuple[bytes, bool]:
        body = {"messages": [asks(text)]}
        return peek_request(json.dumps(body, ensure_ascii=ascii_only).encode()).opening({})

    for word in ("word ", "\u4e16\u754c", "\u00e9"):
        long = word * HALF_TEXT_BYTES
        assert opened(f"It is 10:31. {long}") == opened(f"It is 9:32:08. {long}")
        assert opened(long) == opened(long, ascii_only=True) != opened(long + "?")
        assert opened("a" + long) != opened("b" + long)


def test_a_prompt_that_grows_keeps_the_opening_of_its_beginning() -> None:
    prompt = "You are an agent. " * PROMPT_KEY_BYTES

    assert peek_request(json.dumps({"prompt": prompt}).encode()).opening({}) == peek_request(
        json.dumps({"prompt": prompt + "more"}).encode()
    ).opening({})


def test_the_cache_of_marks_changes_nothing_and_is_bounded() -> None:
    marks: dict[bytes, bytes] = {}
    bodies = [
        json.dumps({"messages": [asks(f"q {n}")]}).encode() for n in range(MARKS_KEPT + 9)
    ] * 2

    found = [peek_request(body).opening(marks) for body in bodies]

    assert found == [peek_request(body).opening({}) for body in bodies]
    assert len(marks) <= MARKS_KEPT
