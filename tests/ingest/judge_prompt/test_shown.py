"""Which parts of messages the judge sees, and which trajectories look the same to it."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from ingest.judge_prompt import (
    appearance,
    shown_answer,
    shown_context,
    shown_trajectory,
    without_media,
)


def call(name: str, ident: str | None, arguments: str = "{}") -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_reasoning_is_hidden() -> None:
    for field in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "4", field: "2 + 2"}
        assert shown_answer(message) == {"content": "4"}
        assert shown_context(message) == {"role": "assistant", "content": "4"}
        assert shown_trajectory([message]) == [{"role": "assistant", "content": "4"}]
        assert shown_answer(message, show_reasoning=True) == {"reasoning": "2 + 2", "content": "4"}


def test_reasoning_among_the_parts_of_a_content_is_hidden_too() -> None:
    text = {"type": "text", "text": "4"}
    message = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text]}
    assert shown_answer(message) == {"content": [text]}
    assert shown_context(message) == {"role": "assistant", "content": [text]}
    assert shown_answer(message, show_reasoning=True) == {"content": message["content"]}


def test_a_message_without_reasoning_is_shown_as_it_is() -> None:
    message = {"role": "tool", "tool_call_id": "x", "content": "ok", "extra": 1}
    assert shown_context(message) is message


def test_calls_are_numbered_through_the_trajectory_and_results_name_them() -> None:
    shown = shown_trajectory(
        [
            {"role": "user", "content": "both, please"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("a", "z9"), call("b", "z8")],
            },
            {"role": "tool", "tool_call_id": "z8", "content": "B"},
            {"role": "tool", "tool_call_id": "z9", "content": "A"},
            {"role": "assistant", "content": None, "tool_calls": [call("c", "z7")]},
            {"role": "tool", "tool_call_id": "never drawn", "content": "?"},
        ]
    )
    assert [one["id"] for one in shown[1]["tool_calls"]] == ["call_1", "call_2"]
    assert [one.get("tool_call_id") for one in shown] == [
        None, None, "call_2", "call_1", None, None,
    ]  # fmt: skip
    assert shown[4]["tool_calls"][0]["id"] == "call_3"


def test_trajectories_that_differ_in_drawn_ids_and_the_writing_of_arguments_look_the_same() -> None:
    def one(ident: str, arguments: str) -> list[str]:
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": "", "tool_calls": [call("a", ident, arguments)]},
            {"role": "tool", "tool_call_id": ident, "content": "ok"},
        ]
        return [appearance(message) for message in shown_trajectory(messages)]

    assert one("x", '{"a": 1, "b": 2}') == one("y", '{"b":2,"a":1}')
    assert one("x", '{"a": 1}') != one("x", '{"a": 2}')


def test_a_refusal_speech_and_silence_are_shown_as_what_they_are() -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "I can't."}
    spoken = {"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "By noon."}}
    empty = {"role": "assistant", "content": None}

    assert shown_answer(refusal) == {"content": "", "refusal": "I can't."}
    assert shown_answer(spoken) == {"content": "", "transcript": "By noon."}
    assert shown_answer(empty) == {"content": ""}
    assert [one["content"] for one in shown_trajectory([refusal, spoken, empty])] == ["", "", ""]
    assert len({appearance(shown_answer(one)) for one in (refusal, spoken, empty)}) == 3


def test_what_a_parser_kept_back_is_shown_as_the_text_that_a_whole_reply_has() -> None:
    streamed = {"role": "assistant", "content": "Let me", "withheld": ' <tool_call>{"name"'}
    whole = {"role": "assistant", "content": 'Let me <tool_call>{"name"'}

    assert shown_answer(streamed) == shown_answer(whole) == {"content": whole["content"]}


def test_arguments_are_shown_without_the_spaces_of_their_server() -> None:
    streamed = {"tool_calls": [call("f", "a", '{"city":"Köln","n":[1,2]}')]}
    whole = {"tool_calls": [call("f", "b", '{"city": "Köln", "n": [1, 2]}')]}
    cut = {"tool_calls": [call("f", "c", '{"city":"K')]}
    older = {"content": None, "function_call": {"name": "f", "arguments": '{"city":"Köln"}'}}

    (shown,) = shown_answer(whole)["tool_calls"]
    assert shown == {"name": "f", "arguments": '{"city": "Köln", "n": [1, 2]}'}
    assert shown_answer(streamed) == shown_answer(whole)
    assert shown_answer(cut)["tool_calls"][0]["arguments"] == '{"city":"K'
    assert shown_answer(older)["tool_calls"] == [{"name": "f", "arguments": '{"city": "Köln"}'}]


# What stands for an image, sound or a file in the judge's prompt.

RED, BLUE = b"\x89PNG red" * 200, b"\x89PNG blue" * 200


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("part", "kind", "size"),
    [
        ({"type": "image_url", "image_url": {"url": data_url(RED)}}, "image/png", 1_600),
        ({"type": "input_image", "image_url": data_url(RED, "image/webp")}, "image/webp", 1_600),
        (
            {
                "type": "image",
                "source": {
                    "type": "base64",
                    "media_type": "image/jpeg",
                    "data": base64.b64encode(BLUE).decode(),
                },
            },
            "image/jpeg",
            1_800,
        ),
        (
            {
                "type": "input_audio",
                "input_audio": {"data": base64.b64encode(RED).decode(), "format": "wav"},
            },
            "wav",
            1_600,
        ),
        (
            {"type": "file", "file": {"file_data": data_url(RED, "application/pdf")}},
            "application/pdf",
            1_600,
        ),
        ({"type": "image_url", "image_url": {"url": "DATA:;BASE64,AAAA"}}, "text/plain", 3),
    ],
)
def test_data_becomes_a_placeholder(part: dict[str, Any], kind: str, size: int) -> None:
    (shown,) = without_media([part])

    text = str(shown)
    assert f"[{kind}, {size} bytes, sha256 of its base64 " in text
    assert len(text) < 250
    assert shown["type"] == part["type"]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "data:image/png;base64,AAAA in a text",
        [],
        [{"type": "text", "text": "data:image/png;base64,AAAA"}],
        [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
        [{"type": "image_url", "image_url": {"url": "data:,plain"}}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        ["a part that is no object", 3, None],
    ],
)
def test_what_holds_no_data_stays_the_same_object(content: Any) -> None:
    assert without_media(content) is content


def test_a_message_is_shown_without_data_wherever_it_stands() -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}
    for shown in (
        shown_answer(message),
        shown_answer(message, show_reasoning=True),
        shown_context(message),
        *shown_trajectory([message]),
    ):
        assert "iVBOR" not in str(shown)
        assert "[image/png, 1600 bytes" in str(shown)
        assert "What is it?" in str(shown)


def test_answers_with_different_images_do_not_look_the_same() -> None:
    red, again, blue = (
        {"role": "assistant", "content": [{"type": "image", "image_url": data_url(data)}]}
        for data in (RED, RED, BLUE)
    )
    assert appearance(shown_answer(red)) == appearance(shown_answer(again))
    assert appearance(shown_answer(red)) != appearance(shown_answer(blue))


def test_deep_parts_are_searched_to_a_bound() -> None:
    deep: dict[str, Any] = {"url": data_url(RED)}
    for _ in range(5_000):
        deep = {"more": deep}
    content = [{"type": "image", "image": deep}]
    assert without_media(content) is content
