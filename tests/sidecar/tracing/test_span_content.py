"""What was said, for spans: every surface in the one form of the conventions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.records import Choice, Exchange, Surface
from sidecar.tracing.spans import content_attributes
from support.exchanges import make_plain_exchange


def exchange(surface: Surface, request: bytes, message: dict[str, Any]) -> Exchange:
    choice = Choice(index=0, message=json.dumps(message).encode(), finish_reason="tool_calls")
    return make_plain_exchange("ex_1", surface=surface, request=request, choices=(choice,))


def text(said: str) -> dict[str, str]:
    return {"type": "text", "content": said}


CALL = {"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Paris"}}
RESULT = {"type": "tool_call_response", "id": "c1", "response": "rainy"}
CHAT_CALL: dict[str, Any] = {
    "id": "c1",
    "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
}
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "rainy"}
EXPECTED = [
    {"role": "system", "parts": [text("Be short.")]},
    {"role": "user", "parts": [text("Weather?")]},
    {"role": "assistant", "parts": [CALL]},
    {"role": "tool", "parts": [RESULT]},
]


@pytest.mark.parametrize(
    ("surface", "request_", "expected"),
    [
        (
            "chat",
            {
                "messages": [
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
                    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "rainy"},
                ]
            },
            EXPECTED,
        ),
        (
            "responses",
            {
                "instructions": "Be short.",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                    {"type": "function_call", "call_id": "c1", **CHAT_CALL["function"]},
                    {"type": "function_call_output", "call_id": "c1", "output": "rainy"},
                ],
            },
            EXPECTED,
        ),
        (
            "messages",
            {
                "system": "Be short.",
                "messages": [
                    {"role": "user", "content": "Weather?"},
                    {"role": "assistant", "content": [TOOL_USE]},
                    {"role": "user", "content": [TOOL_RESULT]},
                ],
            },
            [*EXPECTED[:3], {"role": "user", "parts": [RESULT]}],
        ),
        ("completions", {"prompt": "Once"}, [{"role": "user", "parts": [text("Once")]}]),
    ],
)
def test_every_surface_gives_the_same_messages(
    surface: Surface, request_: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    made = content_attributes(exchange(surface, json.dumps(request_).encode(), {}))

    assert json.loads(made["gen_ai.input.messages"]) == expected


def test_the_answer_has_reasoning_text_and_calls_and_why_it_ended() -> None:
    message = {
        "role": "assistant",
        "reasoning": "Look it up.",
        "content": "A moment.",
        "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": "not json"}}],
    }

    made = content_attributes(exchange("chat", b'{"messages":[],"tools":[{"a":1}]}', message))

    assert json.loads(made["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "Look it up."},
                text("A moment."),
                {**CALL, "arguments": "not json"},
            ],
            "finish_reason": "tool_calls",
        }
    ]
    assert json.loads(made["gen_ai.tool.definitions"]) == [{"a": 1}]


def test_a_picture_is_named_and_not_copied() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    request = json.dumps({"messages": [{"role": "user", "content": [picture]}]}).encode()

    made = content_attributes(exchange("chat", request, {}))

    assert json.loads(made["gen_ai.input.messages"])[0]["parts"] == [{"type": "image_url"}]


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"[]",
        b'{"messages":7}',
        b'{"messages":[1,null,{"content":[3]},{"tool_calls":["x",{"function":4}]}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_whatever_a_client_sends_is_no_error(request_: bytes) -> None:
    made = content_attributes(exchange("chat", request_, {"role": "assistant", "content": "Hi"}))

    assert all(value.isascii() for value in made.values())
    assert json.loads(made["gen_ai.output.messages"])[0]["parts"] == [text("Hi")]
