"""What stands for an image, sound or a file in the judge's prompt."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from ingest.judge_prompt import looks, shown_answer, shown_context, shown_trajectory, without_media

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
def test_data_becomes_a_placeholder_with_kind_size_and_digest(
    part: dict[str, Any], kind: str, size: int
) -> None:
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
    assert looks(shown_answer(red)) == looks(shown_answer(again))
    assert looks(shown_answer(red)) != looks(shown_answer(blue))


def test_deep_parts_are_searched_to_a_bound() -> None:
    deep: dict[str, Any] = {"url": data_url(RED)}
    for _ in range(5_000):
        deep = {"more": deep}
    content = [{"type": "image", "image": deep}]
    assert without_media(content) is content
