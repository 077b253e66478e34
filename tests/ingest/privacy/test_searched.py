"""What was searched before is not read again, and the result is the same as without it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from ingest.privacy.detectors import Detectors
from ingest.privacy.texts import Searched, kinds_in
from sidecar.settings import Privacy
from sidecar.settings.store import BUILT_IN

DETECTORS = Detectors(BUILT_IN)
LIMIT = 1_000_000
PIECES = st.sampled_from(
    [
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow",
        "IBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN RSA",
        " PRIVATE KEY-----",
        "//registry/:_authToken=",
        "npm_abcdefgh",
        "4111 1111 1111 1111",
        "4111 1111",
        "1111 1111",
        "1700000000000",
        "123-45-",
        "6789",
        "a@b",
        ".de",
        "https://name:",
        "word@host",
        "Bearer ",
        "abcdefghijklmnopqrstuvwxyz",
        '{"card": "4111\\u0031111 1111 1111"}',
        '{"open": "\\n',
        "hello",
        "\x00",
        "\\",
        "é\n",
    ]
)
TEXTS = st.lists(PIECES, max_size=3).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none() | st.just(4111111111111111),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": VALUES})
BODIES = st.builds(
    lambda messages, others: json.dumps({**others, "messages": messages}).encode(),
    st.lists(MESSAGES, max_size=4),
    st.dictionaries(TEXTS, VALUES, max_size=2),
)
OTHER_BODIES = VALUES.map(lambda value: json.dumps(value).encode()) | st.sampled_from(
    [b"\xff a@b.de", b"{", b'{"messages": [{"content": "\xff"}, {"content": "4111 1111"}]}']
)


@pytest.fixture(scope="module", autouse=True)
def short_bodies_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ingest.privacy.texts.SPLIT_BYTES", 0)
        yield


@settings(max_examples=50)
@given(
    st.lists(st.lists(BODIES | OTHER_BODIES, max_size=3), max_size=4),
    st.sampled_from([0, 1_000, LIMIT]),
)
def test_the_result_is_the_same_without_it(requests: list[list[bytes]], memory: int) -> None:
    searched = Searched(memory)
    for bodies in [*requests, *requests]:
        found = kinds_in(bodies, DETECTORS, max_bytes=LIMIT, searched=searched)
        assert found == kinds_in(bodies, DETECTORS, max_bytes=LIMIT)


def test_a_pattern_of_an_operator_may_reach_over_two_messages() -> None:
    detectors = Detectors(("TWO",), {"TWO": "(?s)one.*two|two.*one"})
    searched = Searched()
    for said in (["one"], ["two"], ["one", "two"]):
        body = json.dumps({"messages": [{"content": text} for text in said]}).encode()
        found = kinds_in([body], detectors, max_bytes=LIMIT, searched=searched)
        assert found == (["TWO"] if len(said) == 2 else [])


def test_a_value_lies_in_one_text() -> None:
    searched = Searched()
    body = json.dumps({"b": "npm_abcdefgh", "a": "//registry/:_authToken="}).encode()
    for _ in range(2):
        assert kinds_in([body], DETECTORS, max_bytes=LIMIT) == []
        assert kinds_in([body], DETECTORS, max_bytes=LIMIT, searched=searched) == []


class Watched(Detectors):
    """Detectors that note what they search."""

    def __init__(self) -> None:
        super().__init__(Privacy().flag)
        self.seen: list[bytes] = []

    def may_match(self, text: bytes) -> bool:
        self.seen.append(text)
        return super().may_match(text)


def test_a_message_is_searched_once() -> None:
    detectors, searched = Watched(), Searched()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "first"}]
    for text in ("second", "third"):
        kinds_in(
            [json.dumps({"model": "m", "messages": messages}).encode()],
            detectors,
            max_bytes=LIMIT,
            searched=searched,
        )
        messages.append({"role": "user", "content": text})

    first, second = detectors.seen
    assert b"be kind" in first
    assert b"second" in second
    assert b"be kind" not in second
    assert b"first" not in second


def test_a_message_with_a_value_is_found_at_each_turn() -> None:
    searched = Searched()
    body = json.dumps({"messages": [{"content": "hello"}, {"content": "a@b.de"}]}).encode()
    for _ in range(3):
        assert kinds_in([body], DETECTORS, max_bytes=LIMIT, searched=searched) == ["EMAIL"]


def test_its_memory_is_bounded_and_what_was_used_last_is_kept() -> None:
    searched = Searched(1_000)
    searched.put(b"first")
    for number in range(20):
        searched.put(str(number).encode() * 900)
        assert searched.is_empty(b"first")

    assert len(searched) == 4
    assert searched.is_empty(b"19" * 900)
    assert not searched.is_empty(b"15" * 900)
