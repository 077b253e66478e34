"""`probe.json`: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from learner.adapter_folder import MAX_BYTES, ProbeFile, read_probe, render_probe

PROBE = ProbeFile(
    prompts=((1, 2), (1, 2, 3)),
    likeliest=({7: -0.25, 8: -1.5}, {9: -0.125}),
    tolerance=0.1,
)


def test_a_written_probe_is_read_as_it_was() -> None:
    assert read_probe(render_probe(PROBE).encode()) == PROBE


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(render_probe(PROBE)), **changes}).encode()


def answer(**changes: Any) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [1], "likeliest": [[7, -0.5]], **changes}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"[]", "cannot be read"),
        (changed(format=2), "its format is 2"),
        (changed(tolerance=0), "its tolerance is 0"),
        (changed(tolerance=None), "cannot be read"),
        (changed(answers=[]), "has 0 prompts"),
        (changed(answers=answer() * 129), "has 129 prompts"),
        (changed(answers=answer(prompt_token_ids=[])), "a prompt is not"),
        (changed(answers=answer(prompt_token_ids=[-1])), "a prompt is not"),
        (changed(answers=answer(prompt_token_ids=["a"])), "a prompt is not"),
        (changed(answers=answer(prompt_token_ids=7)), "cannot be read"),
        (changed(answers=answer(likeliest=[])), "the likeliest tokens"),
        (changed(answers=answer(likeliest=[[7, None]])), "the likeliest tokens"),
        (changed(answers=answer(likeliest=[[7]])), "has length 1"),
        (changed(answers=[{}]), "cannot be read"),
        (b" " * (MAX_BYTES + 1), "has more than"),
    ],
)
def test_another_file_is_refused_in_words(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_probe(content)
