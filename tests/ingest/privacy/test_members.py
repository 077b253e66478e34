"""A value in a repeated member is found, though decoding keeps the last member of a name only."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, strategies as st

from ingest.privacy.detectors import Detectors
from ingest.privacy.screen import Screen
from ingest.privacy.texts import Redaction, RepeatedMemberError, Searched, decoded, kinds_in
from sidecar.settings import Privacy
from sidecar.settings.store import BUILT_IN
from support.ingest_kit import make_exchange

DETECTORS = Detectors(BUILT_IN)
CARD = "4111 1111 1111 1111"
REPEATED = {
    "in a message": '{"messages":[{"role":"user","content":"CARD","content":"x"}]}',
    "outermost": '{"prompt":"CARD","messages":[{"content":"x"}],"prompt":"x"}',
    "with blanks": '{"messages" : [{"content"\n: "CARD", "content" : "x"}]}',
    "by an escape": '{"messages":[{"content":"CARD","c\\u006fntent":"x"}]}',
    "with a backslash": '{"messages":[{"a\\\\":"CARD","a\\\\":"x"}]}',
    "as an object": '{"messages":[{"content":{"a":"CARD","b":":"},"content":{"c":1}}]}',
    "in arguments": '{"messages":[{"arguments":"{\\"a\\":\\"CARD\\",\\"a\\":\\"x\\"}"}]}',
}


@pytest.mark.parametrize("form", REPEATED)
@pytest.mark.parametrize("filled", [0, 5_000])
def test_a_repeated_member_hides_no_value(form: str, filled: int) -> None:
    body = REPEATED[form].replace("CARD", CARD)
    body = body.replace('{"', '{"filled":"' + "word: " * filled + '","', 1)

    for searched in (None, Searched()):
        found = kinds_in([body.encode()], DETECTORS, max_bytes=99_999, searched=searched)
        assert found == ["CREDIT_CARD"]
    kept = Redaction(DETECTORS, max_bytes=99_999).body(body.encode()).decode()
    assert kept == body.replace(CARD, "<CREDIT_CARD_1>")


def test_no_policy_stores_what_a_repeated_member_holds() -> None:
    exchange = make_exchange("ex", request=REPEATED["in a message"].replace("CARD", CARD).encode())

    assert Screen(Privacy(flagged="drop"))(exchange).exchange is None
    stored = Screen(Privacy(before_storage=True))(exchange).exchange
    assert stored is not None
    assert CARD.encode() not in stored.request


@pytest.mark.parametrize(
    "number", ["4111111111111111", "4111111111111111.0", "4.111111111111111e15"]
)
def test_a_card_number_without_quotes_is_found_as_a_float_too(number: str) -> None:
    body = b'{"card": %s, "at": 1700000000000.5}' % number.encode()

    assert kinds_in([body], DETECTORS, max_bytes=999) == ["CREDIT_CARD"]
    hidden = json.loads(Redaction(DETECTORS, max_bytes=999).body(body))
    assert hidden == {"card": "<CREDIT_CARD_1>", "at": 1700000000000.5}


NAMES = st.text(st.sampled_from('a\\":, \n'), max_size=3)
VALUES = st.recursive(
    NAMES | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(VALUES, st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
def test_no_value_without_one_is_refused(value: object, separators: tuple[str, str]) -> None:
    assert decoded(json.dumps(value, separators=separators)) == value


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.data())
def test_each_repeated_member_is_refused(members: dict[str, object], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(members)))
    blank = data.draw(st.sampled_from(["", " ", "\n\t"]))
    written = json.dumps(members)[:-1] + f", {json.dumps(name)}{blank}:1}}"

    assert msgspec.json.decode(written)[name] == 1
    with pytest.raises(RepeatedMemberError):
        decoded(written)
