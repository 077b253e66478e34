"""Placeholders in place of values, in JSON and in what is no JSON."""

from __future__ import annotations

import json

import pytest

from ingest.privacy.detectors import Detectors
from ingest.privacy.texts import Redaction, TooLargeError, kinds_in
from sidecar.settings.store import BUILT_IN

DETECTORS = Detectors(BUILT_IN)


def redaction(max_bytes: int = 10_000) -> Redaction:
    return Redaction(DETECTORS, max_bytes=max_bytes)


def test_one_value_has_one_placeholder_everywhere() -> None:
    seen = redaction().json(
        [
            {"content": "I am a@b.de, she is c@d.fr"},
            {"content": "Hello c@d.fr", "card": 4111111111111111},
            ("a@b.de",),
        ]
    )

    assert seen == [
        {"content": "I am <EMAIL_1>, she is <EMAIL_2>"},
        {"content": "Hello <EMAIL_2>", "card": "<CREDIT_CARD_1>"},
        ["<EMAIL_1>"],
    ]


def test_a_value_without_anything_to_hide_stays_the_same_object() -> None:
    value = {"a": ["b", 1, None, {"c": True}], "d": 1.0}
    assert redaction().json(value) is value
    body = b'{"a" :  "b"}'
    assert redaction().body(body) is body


@pytest.mark.parametrize("before", ["", " ", "\n\t"])
def test_json_inside_a_text_is_searched_as_json(before: str) -> None:
    arguments = before + '{"mail": "a\\u0040b.de", "note": "\\"x\\""}'

    (changed,) = redaction().json([arguments])

    assert json.loads(changed) == {"mail": "<EMAIL_1>", "note": '"x"'}
    assert kinds_in([json.dumps({"arguments": arguments}).encode()], DETECTORS, max_bytes=999) == [
        "EMAIL"
    ]


def test_names_of_members_are_searched_too() -> None:
    assert redaction().json({"a@b.de": 1}) == {"<EMAIL_1>": 1}


def test_a_body_that_is_no_json_is_searched_as_text() -> None:
    assert redaction().body(b"\xff a@b.de") == b"\xff <EMAIL_1>"
    assert kinds_in([b"\xff a@b.de"], DETECTORS, max_bytes=99) == ["EMAIL"]


def test_half_a_surrogate_pair_survives() -> None:
    assert redaction().json("\ud800 a@b.de") == "\ud800 <EMAIL_1>"


def test_more_text_than_is_searched_is_an_error() -> None:
    with pytest.raises(TooLargeError):
        redaction(100).json(["x" * 60, "x" * 60])
    with pytest.raises(TooLargeError):
        kinds_in([b"x" * 60, b"x" * 60], DETECTORS, max_bytes=100)
