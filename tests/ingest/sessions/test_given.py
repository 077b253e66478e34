"""Messages that a client gives to its requests from their beginning identify no conversation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings, strategies as st

from ingest.sessions.messages import Arrival, Conversation, Message, Place
from ingest.sessions.node import MAX_CALLERS, MAX_OPENINGS
from ingest.sessions.tree import SessionTree

Messages = tuple[Message, ...]
SHORT = ("positive", "negative", "Hello! How can I help you today?")
LONG = tuple(
    f"The parcel number {number} left the house on Monday, and will reach you by Friday evening."
    for number in range(4)
)
WORDS = st.sampled_from(SHORT + LONG)


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


def question(number: int) -> Message:
    return user(f"Question {number}: where is my parcel, and why is it late again?")


class Traffic:
    """Requests of one caller, one a second."""

    def __init__(self) -> None:
        self.tree = SessionTree()
        self.places: dict[str, Place] = {}
        self.full: list[str] = []

    def send(self, messages: Messages, reply: str, system: str = "Classify.", **more: str) -> str:
        name = f"ex_{len(self.places)}"
        arrival = Arrival(
            exchange_id=name,
            at=float(len(self.places)),
            **{"project": "p", "key_id": "k", "user": "", "session_header": ""},
            **{"trace_id": "", "turn_id": ""},
            conversation=Conversation(messages, system, ()),
            replies=(said(reply),),
        )
        arrival = replace(arrival, **more)  # type: ignore[arg-type]
        for place in self.tree.place(arrival, now=arrival.at):
            self.places[place.exchange_id] = place
            self.full += [place.full] if place.full is not None else []
        return name

    @property
    def sessions(self) -> int:
        return len({place.session for place in self.places.values()})


@st.composite
def prefixes(draw: st.DrawFn) -> Messages:
    """A greeting, examples, or both: what a client puts before each question."""
    texts = draw(st.lists(st.tuples(st.integers(0, 3), WORDS), max_size=4))
    greeting = draw(st.none() | WORDS)
    examples = [one for number, word in texts for one in (user(f"Example {number}"), said(word))]
    return (*(() if greeting is None else (said(greeting),)), *examples)


@settings(max_examples=100)
@given(prefixes(), st.lists(WORDS, min_size=2, max_size=12))
def test_requests_that_share_a_beginning_are_sessions(prefix: Messages, replies: list[str]) -> None:
    traffic = Traffic()

    for number, reply in enumerate(replies):
        traffic.send((*prefix, question(number)), reply)

    assert traffic.sessions == len(replies)


@settings(max_examples=100)
@given(prefixes(), st.lists(st.integers(0, 3), min_size=2, max_size=24), st.data())
def test_continuations_link_whatever_is_given(
    prefix: Messages, turns: list[int], data: st.DataObject
) -> None:
    """Up to four conversations at once, whose answers may be words of the prefix. A question asked
    before the answer tells them apart, also where only the last messages are sent."""
    traffic = Traffic()
    said_in: dict[int, Messages] = {}
    last: dict[int, str] = {}

    for number, conversation in enumerate(turns):
        before = said_in.get(conversation, prefix)
        messages = (*before, question(number))
        reply = data.draw(WORDS)
        name = traffic.send(messages, reply)
        assert traffic.places[name].parent == last.get(conversation)
        said_in[conversation], last[conversation] = (*messages, said(reply)), name

    assert traffic.sessions == len(set(turns))


def test_examples_drawn_anew_join_nothing_even_when_they_are_asked_themselves() -> None:
    """Forty examples, of which each request has three; each is also asked, and answered in its own
    words, as when a set of examples is tested by leaving one out."""
    traffic, rng = Traffic(), Random(1)
    answers = [f"{LONG[number % 4]} Its code is {number}." for number in range(40)]

    for number in range(300):
        shown = rng.sample(range(40), 3)
        pairs = [one for at in shown for one in (question(at), said(answers[at]))]
        traffic.send((*pairs, question(number % 40)), answers[number % 40])

    assert traffic.sessions >= 297


def test_a_greeting_that_the_model_repeats_joins_nothing() -> None:
    greeting = "Hello, I am the assistant of the shop, day and night. How can I help you?"
    traffic = Traffic()
    traffic.send((user("hi"),), greeting)  # a client that shows no greeting

    for number in range(300):
        traffic.send((said(greeting), question(number)), greeting if number == 5 else SHORT[0])

    assert traffic.sessions >= 300


def test_an_example_that_is_asked_later_takes_no_request_that_was_there_before() -> None:
    traffic = Traffic()
    pair = (question(900), said(LONG[0]))
    for number in range(20):
        traffic.send((*pair, question(number)), SHORT[0])

    traffic.send((question(900),), LONG[0])
    for number in range(20, 40):
        traffic.send((*pair, question(number)), SHORT[0])

    assert traffic.sessions == 40  # the first one after it may continue it


def test_a_name_that_many_callers_send_is_no_session() -> None:
    traffic = Traffic()

    for number in range(20):
        traffic.send((question(number),), "Yes.", user=f"u{number}", session_header="h:all")

    assert traffic.sessions == 1 + 20 - MAX_CALLERS
    assert traffic.full == ["too_many_callers"] * (20 - MAX_CALLERS)


def test_a_name_with_many_openings_is_no_session_and_its_conversations_go_on() -> None:
    traffic = Traffic()
    for number in range(MAX_OPENINGS):
        traffic.send((question(number),), "Yes.", session_header="h:all")

    first = traffic.send((question(999),), "In a day.", session_header="h:all")
    second = traffic.send(
        (question(999), said("In a day."), user("Thanks")), "Bye.", session_header="h:all"
    )

    assert traffic.full == ["too_many_openings"]
    assert traffic.places[first].session == first == traffic.places[second].parent
    assert traffic.sessions == 2
