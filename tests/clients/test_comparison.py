"""The comparison finds every planted difference, and forgives ids and times alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.comparison import canonical, differences

CHUNKS: list[Any] = [
    {
        "id": "chatcmpl-83578cbde12f2953",
        "created": 1795259964,
        "choices": [{"delta": {"content": text}, "logprobs": None, "token_ids": None}],
        "usage": {"total_tokens": 35},
    }
    for text in ("The", " capital")
]
OTHERS: list[Any] = [
    {**chunk, "id": "chatcmpl-999ecc2d206870dc", "created": 1795259970} for chunk in CHUNKS
]


def test_ids_and_times_of_another_request_are_no_difference() -> None:
    assert differences(CHUNKS, OTHERS) == []


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda made: made.pop(), ": 2 items != 1"),
        (lambda made: made.append({}), ": 2 items != 3"),
        (lambda made: made.reverse(), "[0].choices[0].delta.content: 'The' != ' capital'"),
        (
            lambda made: made[1]["choices"][0]["delta"].update(content=" Capital"),
            "[1].choices[0].delta.content: ' capital' != ' Capital'",
        ),
        (
            lambda made: made[0]["choices"][0].update(token_ids=[504]),
            "[0].choices[0].token_ids: None != [504]",
        ),
        (
            lambda made: made[0]["choices"][0].pop("logprobs"),
            "[0].choices[0].logprobs: None != '<missing>'",
        ),
        (lambda made: made[0].update(more=None), "[0].more: '<missing>' != None"),
        (lambda made: made[0]["usage"].update(total_tokens=35.0), "[0].usage.total_tokens: 35 != "),
        (lambda made: made[0].update(created=None), "[0].created: '<time>' != None"),
        (
            lambda made: made[1].update(id="chatcmpl-0000000000000000"),
            "[1].id: '<id 1>' != '<id 2>'",
        ),
        (lambda made: made[0].update(id="cmpl-1"), "[0].id: '<id 1>' != 'cmpl-1'"),
        (lambda made: made[0].update(id=made[0].pop("id")), "[0]: keys in the order "),
    ],
)
def test_a_planted_difference_is_found(plant: Callable[[Any], Any], found: str) -> None:
    planted = copy.deepcopy(OTHERS)
    plant(planted)

    assert any(line.startswith(found) for line in differences(CHUNKS, planted))


def test_ids_and_times_inside_a_text_are_found_there_too() -> None:
    text = '{"id":"cmpl-9dc3af7be6b9aeb7","created":1795259964,"text":"a cmpl- of 1795259964"}'

    assert canonical(text) == '{"id":"<id 1>",<time>,"text":"a cmpl- of 1795259964"}'
