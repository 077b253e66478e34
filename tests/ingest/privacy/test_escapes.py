r"""Values behind an escape, such as `\n4111`, in texts that are no JSON as a whole."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from ingest.privacy import detectors
from ingest.privacy.detectors import Detectors
from ingest.privacy.texts import Redaction, kinds_in
from sidecar.settings.store import BUILT_IN

DETECTORS = Detectors(BUILT_IN)
VALUES = {
    "CREDIT_CARD": "4111 1111 1111 1111",
    "IBAN": "DE89370400440532013000",
    "SECRET": "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "US_SSN": "078-05-1120",
    "PHONE": "415-555-2671",
    "EMAIL": "anna@example.org",
}


def note(value: str) -> str:
    return json.dumps({"note": f"pay with\n{value}\nthanks"})


def redacted(text: str) -> str:
    changed = Redaction(DETECTORS, max_bytes=100_000).json(text)
    assert isinstance(changed, str)
    return changed


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda value: f"Result: {note(value)}", id="words-before"),
        pytest.param(lambda value: f"{note(value)}\n{note('none')}", id="lines"),
        pytest.param(lambda value: f"```json\n{note(value)}\n```", id="fenced"),
        pytest.param(lambda value: note(value)[:-3], id="cut"),
        pytest.param(lambda value: json.dumps(f"is\t{value}"), id="string"),
        pytest.param(lambda value: "x " + json.dumps(f"谢{value}"), id="letter"),
        pytest.param(lambda value: "x " + json.dumps(note(value)), id="json-in-json"),
        pytest.param(lambda value: f"it is '\\xa0{value}'", id="python"),
    ],
)
def test_a_value_behind_an_escape_is_found_and_hidden(form: object, kind: str) -> None:
    assert callable(form)
    text = form(VALUES[kind])
    body = json.dumps({"messages": [{"role": "tool", "content": text}]}).encode()

    assert kinds_in([body], DETECTORS, max_bytes=100_000) == [kind]
    assert redacted(text) == text.replace(VALUES[kind], f"<{kind}_1>")


def test_a_value_that_holds_escapes_is_hidden_with_them() -> None:
    text = r'is {"m": "a\u0040b.de \ud83d\ude00", "c": "4111\u00201111 1111 1111"}, a@b.de'
    assert (
        redacted(text) == r'is {"m": "<EMAIL_1> \ud83d\ude00", "c": "<CREDIT_CARD_1>"}, <EMAIL_1>'
    )


def test_the_letter_of_an_escape_is_no_part_of_a_value() -> None:
    assert redacted(r"x: \nanna@b.de, \\nanna@b.de, anna@b.de") == (
        r"x: \n<EMAIL_1>, \\n<EMAIL_1>, <EMAIL_1>"
    )
    assert redacted(r"C:\4\anna@b.de") == r"C:\4\<EMAIL_1>"


def test_a_body_that_is_no_json_is_searched_without_its_escapes_too() -> None:
    body = b'{"content": "pay\\n4111 1111 1111 1111'
    assert kinds_in([body], DETECTORS, max_bytes=99) == ["CREDIT_CARD"]
    assert Redaction(DETECTORS, max_bytes=99).body(body) == b'{"content": "pay\\n<CREDIT_CARD_1>'


PIECES = st.sampled_from(
    [
        *VALUES.values(),
        *(
            r"\n",
            r"\t",
            r"\\",
            "\\",
            r"\"",
            r"\/",
            r"\u0034",
            r"\u00e9",
            r"\ud83d\ude00",
            r"\ud83d",
        ),
        *(
            r"\x34",
            r"\u12",
            "4111",
            " 1111",
            "anna@",
            "b.de",
            "://u:",
            "pw@",
            "n",
            "é",
            "\n",
            " ",
            '"',
        ),
    ]
)


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=8).map("".join), st.integers(0, 2))
def test_escapes_are_undone_as_json_does(text: str, deep: int) -> None:
    written = text
    for _ in range(deep):
        written = json.dumps(written)[1:-1]
    (undone, *_) = [*detectors.levels(written.encode()), written.encode()]
    # The quick way and the one that counts places must agree, also with a byte that is no UTF-8.
    (slow, *_) = [*detectors.levels(b"\xff" + written.encode()), b"\xff" + written.encode()]
    assert slow == b"\xff" + undone
    if deep:
        once = json.loads(f'"{written}"').encode("utf-8", "surrogatepass")
        assert undone == once


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=8).map("".join), st.integers(0, 2))
def test_all_that_is_found_as_the_text_stands_is_found_still(text: str, deep: int) -> None:
    """But for the letters of an escape, with which a value began."""
    for _ in range(deep):
        text = "x" + json.dumps(text)
    data = text.encode()
    found = detectors.find(DETECTORS, data)
    assert all(one.end <= other.start for one, other in pairwise(found))
    for old in DETECTORS.find(data):
        (new,) = (one for one in found if one.start < old.end and old.end <= one.end)
        escape = data[max(0, old.start - 6) : new.start]
        assert new.start <= old.start or b"\\" in escape[-6:]
