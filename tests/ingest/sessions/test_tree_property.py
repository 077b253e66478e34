"""Whatever the conversations and the order of arrival: each exchange finds its parent."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings, strategies as st

from ingest.sessions.messages import Arrival, Conversation, Message, Place
from ingest.sessions.tree import SessionTree


@dataclass(frozen=True, slots=True)
class Sent:
    arrival: Arrival
    parent: str | None
    root: str


def forest(parents: list[int | None]) -> list[Sent]:
    """Exchanges with texts of their own; the parent of each is an earlier one, or None."""
    sent: list[Sent] = []
    paths: list[tuple[Message, ...]] = []
    for number, parent in enumerate(parents):
        before = () if parent is None else paths[parent]
        messages = (
            *before,
            Message("user", f"question {number} about the work that is to be done"),
        )
        reply = Message("assistant", f"answer {number}: the work that is to be done goes on")
        paths.append((*messages, reply))
        name = f"ex_{number}"
        arrival = Arrival(
            exchange_id=name,
            at=float(number),
            **{"project": "p", "key_id": "k", "user": "", "session_header": ""},
            **{"trace_id": "", "turn_id": ""},
            conversation=Conversation(messages, "You are an agent.", ()),
            replies=(reply,),
        )
        above = None if parent is None else sent[parent]
        sent.append(
            Sent(
                arrival,
                None if above is None else above.arrival.exchange_id,
                name if above is None else above.root,
            )
        )
    return sent


@st.composite
def forests(draw: st.DrawFn) -> list[Sent]:
    size = draw(st.integers(1, 24))
    parents = [
        draw(st.none() | st.integers(0, number - 1)) if number else None for number in range(size)
    ]
    return forest(parents)


def found(order: list[Sent]) -> dict[str, Place]:
    tree = SessionTree()
    places: dict[str, Place] = {}
    for now, one in enumerate(order):
        for place in tree.place(one.arrival, now=float(now)):
            places[place.exchange_id] = place
    return places


@settings(max_examples=100)
@given(st.data())
def test_every_exchange_finds_its_parent_in_any_order_of_arrival(data: st.DataObject) -> None:
    sent = data.draw(forests())
    order = data.draw(st.permutations(sent))

    places = found(list(order))

    assert {one.arrival.exchange_id: one.parent for one in sent} == {
        name: place.parent for name, place in places.items()
    }
    sessions = {one.root: places[one.root].session for one in sent}
    assert len(set(sessions.values())) == len(sessions)
    for one in sent:
        place = places[one.arrival.exchange_id]
        assert place.session == sessions[one.root]
        assert place.turn == (0 if one.parent is None else places[one.parent].turn + 1)


@settings(max_examples=100)
@given(forests())
def test_an_exchange_that_comes_twice_changes_nothing(sent: list[Sent]) -> None:
    once, twice = found(sent), found([*sent, *sent])

    assert once == twice
