"""The score of a session finder: worked by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.sessions.records import Placement, SentRequest, Side
from benchmarks.sessions.scoring import leak, right_parents, right_sessions
from benchmarks.sessions.twins import settled, twins_of
from benchmarks.sessions.wrong import wrong
from ingest.grouping.features import is_held_out


def sent(
    name: str,
    session: str,
    parent: str | None,
    *,
    at: float = 0.0,
    says: str = "hi",
    reply: str = "hello",
    call: str = "",
    body: str = "",
    known: str = "",
) -> SentRequest:
    message: dict[str, object] = {"role": "assistant", "content": reply}
    if call:
        message["tool_calls"] = [{"id": call, "function": {"name": "f", "arguments": "{}"}}]
    request = {"messages": [{"role": "user", "content": says}], "metadata": body, "id": known}
    return SentRequest(
        exchange_id=name,
        at=at,
        handed_at=at,
        project="default",
        key_id="key",
        user="",
        session_header="",
        trace_id="",
        surface="chat",
        request=json.dumps(request).encode(),
        replies=(json.dumps(message).encode(),),
        true_session=session,
        true_parent=parent,
    )


def found(**named: tuple[str, str | None]) -> dict[str, Placement]:
    return {
        name: Placement(exchange_id=name, session=session, parent=parent)
        for name, (session, parent) in named.items()
    }


STREAM = [
    sent("a1", "A", None, at=1),
    sent("a2", "A", "a1", at=3, says="more"),
    sent("a3", "A", "a2", at=5, says="and more"),
    sent("b1", "B", None, at=2, says="other"),
    sent("b2", "B", "b1", at=4, says="other yet"),
]


def test_a_request_in_another_session_than_most_of_its_own_is_wrong() -> None:
    said = found(a1=("x", None), a2=("x", "a1"), a3=("y", None), b1=("y", None), b2=("y", "a3"))

    assert right_sessions(STREAM, said) == 4 / 5  # a3 is among the requests of B
    assert right_parents(STREAM, said) == 3 / 5  # of a3 and b2 it is wrong


def test_a_conversation_on_both_sides_of_the_held_out_rule_leaks() -> None:
    names = [f"s{number}" for number in range(100)]
    inside = next(name for name in names if is_held_out(name, 0.1))
    outside = next(name for name in names if not is_held_out(name, 0.1))
    said = found(
        a1=(inside, None),
        a2=(outside, "a1"),
        a3=(outside, "a2"),
        b1=(inside, None),
        b2=(inside, ""),
    )

    assert leak(STREAM, said.values()) == 1 / 2


@pytest.mark.parametrize(
    ("corrected_at", "side", "leaked"),
    [
        (14.0, None, 0),  # b2 is handed over at 4 and decided at 14
        (14.1, None, 1 / 2),
        (14.1, "neither", 0),
    ],
)
def test_a_session_that_is_corrected_after_its_decision_leaks_all_the_same(
    corrected_at: float, side: Side | None, leaked: float
) -> None:
    names = [f"s{number}" for number in range(100)]
    inside = next(name for name in names if is_held_out(name, 0.1))
    outside = next(name for name in names if not is_held_out(name, 0.1))
    first = Placement(exchange_id="b2", session=inside, parent=None, at=4.0)
    then = Placement(exchange_id="b2", session=outside, parent="b1", at=corrected_at, side=side)

    assert leak(STREAM, [first, then], settle_s=10.0) == leaked


TWINS = [
    sent("a1", "A", None, at=1),
    sent("b1", "B", None, at=2),
    sent("a2", "A", "a1", at=3, says="the first"),
    sent("b2", "B", "b1", at=4, says="the second"),
]


def test_equal_requests_may_be_exchanged() -> None:
    said = found(a1=("x", None), b1=("y", None), a2=("y", "b1"), b2=("x", "a1"))

    truth = settled(TWINS, said, twins_of(TWINS))

    assert [(one.true_session, one.true_parent) for one in truth] == [
        ("A", None), ("B", None), ("B", "b1"), ("A", "a1"),
    ]  # fmt: skip
    assert right_sessions(truth, said) == right_parents(truth, said) == 1
    assert right_parents(TWINS, said) == 2 / 4


@pytest.mark.parametrize(
    ("first", "second", "first_later", "second_later"),
    [
        pytest.param({"call": "id-a"}, {"call": "id-b"}, "id-a", "id-b", id="ids of calls"),
        pytest.param({"known": "id-a"}, {"known": "id-b"}, "id-a", "id-b", id="ids of histories"),
        pytest.param(
            {"known": "id-0", "call": "id-a"},
            {"known": "id-0", "call": "id-b"},
            "id-0 id-a",
            "id-0 id-b",
            id="some ids in common",
        ),
    ],
)
def test_equal_requests_with_ids_that_come_back_are_not_exchanged(
    first: dict[str, str], second: dict[str, str], first_later: str, second_later: str
) -> None:
    stream = [
        sent("a1", "A", None, at=1, **first),
        sent("b1", "B", None, at=2, **second),
        sent("a2", "A", "a1", at=3, says="the first", body=first_later),
        sent("b2", "B", "b1", at=4, says="the second", body=second_later),
    ]
    said = found(a1=("x", None), b1=("y", None), a2=("y", "b1"), b2=("x", "a1"))

    truth = settled(stream, said, twins_of(stream))

    assert truth == stream


def test_a_wrong_parent_is_counted_by_what_the_texts_could_have_told() -> None:
    own, shared = "a text of this conversation alone", "a text that several conversations hold"
    stream = [
        sent("a1", "A", None, at=1, says=own, reply="a long reply of the first session"),
        sent("b1", "B", None, at=2, says=shared),
        sent("a2", "A", None, at=3, says=shared),
        sent("a3", "A", "a1", at=4, says=own),
        sent("b2", "B", "b1", at=5, says=shared),
        sent("a4", "A", "a2", at=6, says="short"),
    ]
    first = found(a1=("A", None), b1=("B", None), a2=("A", None))
    said = first | found(a3=("B", "b1"), b2=("A", "a2"), a4=("x", None))

    assert wrong(stream, said) == {
        "another session, text of its own": 1,
        "another session, shared text": 1,
        "a new session, no text": 1,
    }
