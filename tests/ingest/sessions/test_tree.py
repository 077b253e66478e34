"""Requests find their place in the tree of conversations by their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ingest.sessions.messages import Arrival, JsonObject, Place, read_conversation, read_reply
from ingest.sessions.tree import SessionTree

SYSTEM = "You are the agent of an airline. Follow the policy. Answer in one line."
TASK = "Please book the flight from Boston to Denver on Monday morning for me."
Messages = list[JsonObject]


class Sidecar:
    """Sends requests to a tree, one a second."""

    def __init__(self, **options: Any) -> None:
        self.tree = SessionTree(**options)
        self.now = 1_000.0
        self.places: dict[str, Place] = {}

    def send(self, messages: Messages, reply: Any = "", **named: Any) -> str:
        """Returns: the exchange id."""
        self.now += 1.0
        exchange_id = f"ex_{len(self.places)}"
        tools: Sequence[str] = named.pop("tools", ())
        system = named.pop("system", SYSTEM)
        request = {
            "messages": [{"role": "system", "content": system}, *messages],
            "tools": [{"type": "function", "function": {"name": tool}} for tool in tools],
        }
        replies = reply if isinstance(reply, list) else [reply]
        defaults = {"project": "p", "key_id": "k", "user": "", "session_header": ""}
        arrival = Arrival(
            exchange_id=exchange_id,
            at=named.pop("at", self.now),
            **{**defaults, "trace_id": "", "turn_id": "", **named},
            conversation=read_conversation(request),
            replies=tuple(
                read_reply(one if isinstance(one, dict) else said(one)) for one in replies
            ),
        )
        for place in self.tree.place(arrival, now=self.now):
            self.places[place.exchange_id] = place
        return exchange_id

    def session(self, exchange_id: str) -> str:
        return self.places[exchange_id].session

    def parent(self, exchange_id: str) -> str | None:
        return self.places[exchange_id].parent


def asks(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def said(text: str) -> JsonObject:
    return {"role": "assistant", "content": text}


def calls(name: str, arguments: str) -> JsonObject:
    call = {"id": f"call_{name}", "type": "function"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**call, "function": {"name": name, "arguments": arguments}}],
    }


def result(text: str, **more: Any) -> JsonObject:
    return {"role": "tool", "tool_call_id": "call_x", "content": text, **more}


@pytest.fixture
def sidecar() -> Sidecar:
    return Sidecar()


def test_a_clock_in_the_system_prompt_changes_nothing(sidecar: Sidecar) -> None:
    first = sidecar.send([asks(TASK)], "Which seat?", system=f"{SYSTEM} It is 10:15.")
    second = sidecar.send(
        [asks(TASK), said("Which seat?"), asks("A window.")], system=f"{SYSTEM} It is 10:16."
    )

    assert sidecar.parent(second) == first


def test_conversations_that_begin_alike_are_two(sidecar: Sidecar) -> None:
    one = sidecar.send([asks("hi")], "Hello! What can I do?")
    two = sidecar.send([asks("hi")], "Hello! What can I do?")
    opening = [asks("hi"), said("Hello! What can I do?")]
    one_next = sidecar.send([*opening, asks("My bag is lost.")], "Which flight?")
    two_next = sidecar.send([*opening, asks("Cancel my trip.")], "Which one?")

    assert sidecar.session(one) != sidecar.session(two)
    assert (sidecar.parent(one_next), sidecar.parent(two_next)) == (one, two)


def test_two_users_never_share_a_session(sidecar: Sidecar) -> None:
    sidecar.send([asks(TASK)], "Which seat?", user="ann")
    other = sidecar.send([asks(TASK), said("Which seat?"), asks("A window.")], user="bob")

    assert sidecar.parent(other) is None
    assert sidecar.session(other) == other


def test_agents_with_the_same_words_are_told_apart(sidecar: Sidecar) -> None:
    buyer = sidecar.send([asks(TASK)], "Done.", system="You buy tickets.", tools=["buy"])
    critic = sidecar.send([asks(TASK)], "Done.", system="You find faults.", tools=["note"])
    more = [asks(TASK), said("Done."), asks("Go on with the second one.")]

    of_critic = sidecar.send(more, system="You find faults.", tools=["note"])
    of_buyer = sidecar.send(more, system="You buy tickets.", tools=["buy"])

    assert (sidecar.parent(of_buyer), sidecar.parent(of_critic)) == (buyer, critic)


def test_a_reply_that_the_client_rewrote_is_known_by_what_is_before_it(sidecar: Sidecar) -> None:
    first = sidecar.send([asks(TASK)], "**Which** seat?")
    second = sidecar.send([asks(TASK), said("Which seat?"), asks("A window.")])

    assert sidecar.parent(second) == first
    assert sidecar.places[second].how == "asked"


def test_any_of_several_choices_is_continued(sidecar: Sidecar) -> None:
    first = sidecar.send([asks(TASK)], ["Which seat?", "Which airline?"])
    second = sidecar.send([asks(TASK), said("Which airline?"), asks("The cheapest.")])

    assert sidecar.parent(second) == first


def test_a_second_continuation_is_a_branch(sidecar: Sidecar) -> None:
    first = sidecar.send([asks(TASK)], "Which seat?")
    opening = [asks(TASK), said("Which seat?")]
    window = sidecar.send([*opening, asks("A window.")])
    aisle = sidecar.send([*opening, asks("No, the aisle.")])

    assert sidecar.parent(window) == sidecar.parent(aisle) == first
    assert [sidecar.places[one].branch for one in (window, aisle)] == [0, 1]


def test_a_retry_stands_beside_its_original(sidecar: Sidecar) -> None:
    first = sidecar.send([asks(TASK)], "Which seat?", turn_id="t1")
    again = sidecar.send([asks(TASK)], "Which seat?", turn_id="t1")

    assert sidecar.parent(again) is None
    assert sidecar.session(again) == first


def test_a_task_that_a_call_hands_on_is_a_branch_of_the_session(sidecar: Sidecar) -> None:
    task = "Find all hotels in Denver that take dogs."
    main = sidecar.send([asks(TASK)], calls("ask_agent", f'{{"task": "{task}"}}'))
    helper = sidecar.send([asks(task)], "Two hotels.", system="You search.", tools=["search"])

    assert sidecar.parent(helper) == main
    assert sidecar.session(helper) == sidecar.session(main)


def test_the_last_messages_of_a_shortened_conversation_name_it(sidecar: Sidecar) -> None:
    turns: Messages = []
    for number in range(8):
        turns.append(asks(f"Step {number} of the work on my trip to Denver, please."))
        last = sidecar.send(turns, f"Step {number} of your trip to Denver is done.")
        turns.append(said(f"Step {number} of your trip to Denver is done."))
    short = sidecar.send([*turns[-4:], asks("And now the last one.")])

    assert sidecar.parent(short) == last
    assert sidecar.places[short].segment == 1


def test_a_summary_that_an_own_request_made_is_linked(sidecar: Sidecar) -> None:
    summary = (
        "The user wants a flight from Boston to Denver. A window seat was chosen. "
        "The payment by card is still to be done, and a hotel for the dog."
    )
    first = sidecar.send([asks(TASK)], "Which seat?")
    made = sidecar.send([asks(TASK), said("Which seat?"), asks("Sum it up.")], summary)
    after = sidecar.send([asks(f"What happened before: {summary}"), asks("Pay by card.")])

    assert sidecar.parent(after) == made
    assert sidecar.session(after) == first
    assert sidecar.places[after].segment == 1


def test_the_name_that_a_client_sends_wins(sidecar: Sidecar) -> None:
    one = sidecar.send([asks(TASK)], "Which seat?", session_header="s1")
    two = sidecar.send([asks("Something else.")], session_header="s1")
    other = sidecar.send([asks(TASK), said("Which seat?"), asks("A.")], session_header="s2")

    assert sidecar.session(one) == sidecar.session(two) == "s1"
    assert sidecar.session(other) == "s2"
    assert sidecar.parent(other) is None


def test_requests_of_one_trace_are_one_session(sidecar: Sidecar) -> None:
    one = sidecar.send([asks(TASK)], "Which seat?", trace_id="a" * 32)
    two = sidecar.send([asks("Which rules hold for dogs?")], trace_id="a" * 32)
    next_turn = sidecar.send([asks(TASK), said("Which seat?"), asks("A.")], trace_id="b" * 32)

    assert sidecar.session(two) == sidecar.session(one) == sidecar.session(next_turn)


@pytest.mark.parametrize("options", [{"max_nodes": 50}, {"ttl_s": 50.0}])
def test_what_is_remembered_is_bounded(options: dict[str, Any]) -> None:
    sidecar = Sidecar(**options)
    for number in range(500):
        turns = [asks(f"Task {number} of five hundred tasks."), said("It is done, number x.")]
        sidecar.send(turns[:1], "It is done, number x.")
        sidecar.send([*turns, asks("Thank you very much, that was all.")], "You are welcome.")

    assert len(sidecar.tree) <= 51
    assert sidecar.tree.keys <= 51 * 12


def test_parts_of_texts_are_remembered_of_the_newest_exchanges_only(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.sessions.tree.MAX_GUESSED", 1)
    summary = "The user wants a flight from Boston to Denver, by the window, paid by card."
    first = sidecar.send([asks(TASK)], summary)
    sidecar.send(
        [asks("Something else that is asked between.")], "It is answered in so many words."
    )
    quoted = sidecar.send([asks(f"Before: {summary} Go on.")])
    continued = sidecar.send([asks(TASK), said(summary), asks("Go on.")])

    assert sidecar.parent(quoted) is None
    assert sidecar.parent(continued) == first


def test_a_record_of_short_answers_and_calls_is_linked_to_its_end(sidecar: Sidecar) -> None:
    task = asks(TASK)
    first = sidecar.send([task], calls("seats", '{"from":"Boston"}'))
    heard = result('{"seats": 12, "price": 199, "currency": "USD", "flight": "UA 523 of Monday"}')
    turns = [task, calls("seats", '{"from":"Boston"}'), heard]
    last = sidecar.send(turns, "Twelve seats are left for you.")
    other = sidecar.send([asks("Which rules hold for dogs on the flights to Denver, please?")])
    record = f"Human: {TASK}\nAI: [seats]\nTool: {heard['content']}\nAI: Twelve seats are left."
    after = sidecar.send([asks(f"Sum this up:\n\n{record}")], system="You sum up.")

    assert sidecar.parent(after) == last
    assert sidecar.session(after) == first != sidecar.session(other)


def test_of_tasks_that_begin_alike_the_one_in_a_record_is_found(sidecar: Sidecar) -> None:
    same = "I want to exchange the water bottle and the desk lamp of my last order, please, and "
    tasks = [
        f"{same}the {kind} lamp should be {how} than the one before, if you have one of these."
        for kind in ("big", "small", "red", "old")
        for how in ("brighter", "darker", "cheaper")
    ]
    answer = "Sure. About the water bottle and the desk lamp: here is what I can do."
    sent = [sidecar.send([asks(task)], answer) for task in tasks]
    records = [
        sidecar.send([asks(f"Sum this up: User: {task} Agent: {answer}")], "The user exchanges.")
        for task in tasks
    ]

    assert [sidecar.parent(record) for record in records] == sent


def test_an_answer_that_many_gave_is_found_by_its_other_parts(sidecar: Sidecar) -> None:
    closing = "Here is what I can say about it. Is there anything else that I can do for you?"
    first = sidecar.send([asks(TASK)], f"The flight to Denver costs 199 dollars today. {closing}")
    for number in range(40):
        sidecar.send([asks(f"Question {number} of the day.")], f"Answer {number}. {closing}")
    record = f"Sum this up: The flight to Denver costs 199 dollars today. {closing}"

    assert sidecar.parent(sidecar.send([asks(record)])) == first


def test_work_that_grows_within_one_message_is_a_chain(sidecar: Sidecar) -> None:
    """Two agents with one prompt and the same short replies; the white space differs."""
    sent: dict[str, list[str]] = {"Boston": [], "Denver": []}
    texts = dict.fromkeys(sent, "Answer with Thought, Action and Observation. Question: Dogs in ")
    for step in range(4):
        for city in sent:
            texts[city] += f"{city}?\nThought:" if step == 0 else f"\nObservation: {city}\nThought:"
            sent[city].append(sidecar.send([asks(texts[city])], " Look.\nAction: search"))
            texts[city] += " Look.\n\nAction:  search"

    for names in sent.values():
        assert [sidecar.parent(one) for one in names] == [None, *names[:-1]]
        assert {sidecar.places[one].how for one in names[1:]} == {"answered"}
        assert {sidecar.session(one) for one in names} == {names[0]}


def test_a_message_that_begins_like_an_earlier_one_continues_nothing(sidecar: Sidecar) -> None:
    first = sidecar.send([asks("Where is my parcel with the lamp?")], "It comes on Friday.")
    other = sidecar.send([asks("Where is my parcel with the lamp? It is late again.")], "Sorry.")

    assert sidecar.session(other) != sidecar.session(first)


@pytest.mark.parametrize("where", ["system", "user"])
def test_an_answer_that_the_prompt_dictates_joins_nothing(sidecar: Sidecar, where: str) -> None:
    canned = "I am sorry, the information is not available in the given context."
    rule = f"Answer from the context. If it is not there, say: {canned} Be short."
    sessions = set()
    for number in range(5):
        question = f"Question {number}: what does paragraph {number} of the contract say?"
        if where == "system":
            sent = sidecar.send([asks(question)], canned, system=rule)
        else:
            sent = sidecar.send([asks(f"{rule} {question}")], canned)
        sessions.add(sidecar.session(sent))

    assert len(sessions) == 5
