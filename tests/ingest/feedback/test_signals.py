"""Each implicit signal: what shows it, what does not, in whatever order the exchanges arrive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from ingest.feedback.signals import alike, in_words, since_answer, tool_error, tool_results
from ingest.feedback.store import annotations_of, find_abandoned
from ingest.intake.choose import Sessions
from ingest.sessions.rows import conversation_of
from sidecar.records import Exchange, Timings
from sidecar.store.models import SignalRow
from support.ingest_kit import Kit, make_choice, make_exchange

both_stores = pytest.mark.both_stores
SYSTEM = {"role": "system", "content": "You help customers of a shop."}
OPENING = {"role": "user", "content": "How do I return a parcel?"}
ANSWER = {"role": "assistant", "content": "served"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
Found = set[tuple[str, str, str | None]]
"""Kind, the exchange that the signal is about, the exchange that shows it."""


def ask(name: str, at: float, *more: dict[str, Any], **changes: Any) -> Exchange:
    """A request at a second, whose answer takes one; more: messages after the opening."""
    return make_exchange(
        name,
        request={"messages": [SYSTEM, OPENING, *more]},
        timings=Timings(started_at=at, total_s=1.0),
        turn_id=changes.pop("turn_id", name),
        **changes,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def store(kit: Kit, exchanges: Sequence[Exchange], *, now: float = 100.0) -> None:
    sessions = Sessions(held_out_rate=0.0)
    for exchange in exchanges:
        kit.take(exchange, sessions=sessions, now=now)


def found(kit: Kit) -> Found:
    with kit.database.read() as session:
        return {
            (row.kind, row.exchange_id, row.by_id) for row in session.scalars(select(SignalRow))
        }


FIRST = ask("first", 10.0)
NEXT = ask("next", 20.0, ANSWER, user("Where is the shop in the city of Bonn?"))
AGAIN = ask("again", 30.0, ANSWER, user("Where is the shop in the city of Bonn?"))
EDITED = ask("edited", 30.0, ANSWER, user("Where is the shop in the city of Köln?"))
OTHER = ask("other", 30.0, ANSWER, user("Thanks, and tell me a joke."))
FAILED = ask(
    "failed",
    30.0,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Error: no such parcel"},
)
FLAGGED = ask(
    "failed",
    30.0,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "No", "is_error": True}
        ],
    },
)
CALLING = msgspec.structs.replace(
    FIRST,
    choices=(
        make_choice(
            message=json.dumps(
                {"role": "assistant", "content": None, "tool_calls": [CALL]}
            ).encode(),
            finish_reason="tool_calls",
        ),
    ),
)
CASES: dict[str, tuple[list[Exchange], Found]] = {
    "asked again after the answer": ([FIRST, NEXT, AGAIN], {("regeneration", "next", "again")}),
    "asked twice at once": (
        [FIRST, NEXT, msgspec.structs.replace(AGAIN, timings=Timings(started_at=20.5))],
        set(),
    ),
    "asked again by the client's own retry": (
        [FIRST, NEXT, msgspec.structs.replace(AGAIN, turn_id="next")],
        {("retry", "next", "again")},
    ),
    "asked again without an answer": (
        [FIRST, msgspec.structs.replace(NEXT, outcome="upstream_error", choices=()), AGAIN],
        {("retry", "next", "again")},
    ),
    "the last message edited": ([FIRST, NEXT, EDITED], {("correction", "next", "edited")}),
    "another question from the same state": ([FIRST, NEXT, OTHER], set()),
    "a tool that failed": ([CALLING, FAILED], {("tool_error", "first", "failed")}),
    "a tool that is marked as failed": ([CALLING, FLAGGED], {("tool_error", "first", "failed")}),
    "a conversation that goes on": ([FIRST, NEXT], set()),
}


@both_stores
@pytest.mark.parametrize("case", CASES)
def test_what_exchanges_show_in_the_order_in_which_they_began(kit: Kit, case: str) -> None:
    exchanges, expected = CASES[case]

    store(kit, exchanges)

    assert found(kit) == expected
    assert sum(kit.counts("signal").values()) == len(expected)


def test_exchanges_that_come_twice_show_the_same(kit: Kit) -> None:
    exchanges, expected = CASES["the last message edited"]

    store(kit, [*exchanges, *exchanges])

    assert found(kit) == expected
    assert kit.counts("signal") == {"correction": 1}


def test_a_signal_is_shown_with_its_exchange(kit: Kit) -> None:
    store(kit, CASES["the last message edited"][0])

    with kit.database.read() as session:
        (signal,) = annotations_of(session, ["next"])["next"].signals

    assert (signal.kind, signal.by_id, signal.at) == ("correction", "edited", 30.0)
    assert signal.evidence["after_s"] == 9.0
    assert signal.evidence["alike"] > 0.8


def test_texts_are_alike_by_runs_of_three_characters() -> None:
    assert alike("abcd", "abcd") == 1.0
    assert alike("abcd", "wxyz") == 0.0
    assert alike("abcd", "abce") == 0.5
    assert alike("", "") == 1.0


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("Error: no such file", "text"),
        ("Traceback (most recent call last):\n  File", "text"),
        ('{"error": "not found"}', "json"),
        ('{"isError": true, "content": []}', "json"),
        ('{"success": false}', "json"),
        ('{"status": "error"}', "json"),
        ('{"error": null, "rows": []}', None),
        ('{"success": true}', None),
        ("No errors were found.", None),
        ("The error: it was mine", None),
        ('{"error": "cut', None),
        ("[" * 100_000, None),
    ],
)
def test_a_tool_failed_when_its_result_says_so(content: str, rule: str | None) -> None:
    request = json.dumps(
        {
            "messages": [
                OPENING,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": content},
            ]
        }
    ).encode()

    assert tool_error(conversation_of(request).messages) == rule


def states(request: dict[str, Any]) -> list[str]:
    """State of each result since the last answer."""
    messages = conversation_of(json.dumps(request).encode()).messages
    return [one.state for one in tool_results(since_answer(messages))]


def of_chat(*contents: Any) -> dict[str, Any]:
    results = [{"role": "tool", "tool_call_id": "c1", "content": one} for one in contents]
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return {"messages": [OPENING, call, *results]}


def of_messages(*results: dict[str, Any]) -> dict[str, Any]:
    """results: fields of each beside its type and id."""
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    parts = [{"type": "tool_result", "tool_use_id": "c1", **one} for one in results]
    called = {"role": "assistant", "content": [use]}
    return {"messages": [OPENING, called, {"role": "user", "content": parts}]}


def of_responses(*items: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    return {"input": [OPENING, call, *items]}


def mcp(**more: Any) -> str:
    return json.dumps({"content": [{"type": "text", "text": "sunny"}], **more})


OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
MCP_CALL = {"type": "mcp_call", "id": "m1", "name": "look", "arguments": "{}", "output": "sunny"}
STATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no tool": ({"messages": [OPENING]}, []),
    "messages, false": (of_messages({"content": "sunny", "is_error": False}), ["ok"]),
    "messages, true": (of_messages({"content": "sunny", "is_error": True}), ["failed"]),
    "messages, absent": (of_messages({"content": "sunny"}), ["unknown"]),
    "messages, no boolean": (
        of_messages({"is_error": 0}, {"is_error": "false"}, {"is_error": "true"}),
        ["unknown", "unknown", "unknown"],
    ),
    "messages, false beside an error": (
        of_messages({"content": "Error: no such city", "is_error": False}),
        ["failed"],
    ),
    "chat, MCP false": (of_chat(mcp(isError=False)), ["ok"]),
    "chat, MCP true": (of_chat(mcp(isError=True)), ["failed"]),
    "chat, MCP absent": (of_chat(mcp()), ["unknown"]),
    "chat, a text that looks well": (of_chat("Done.", '{"success": true}'), ["unknown"] * 2),
    "chat, a flag of another protocol": (
        {"messages": [{"role": "tool", "content": "sunny", "is_error": False}]},
        ["unknown"],
    ),
    "chat, today's rules": (of_chat("Error: no", '{"ok": false}'), ["failed"] * 2),
    "chat, damaged JSON": (
        of_chat(mcp(isError=False)[:-1], '{"isError": false', "{"),
        ["unknown"] * 3,
    ),
    "chat, deep JSON": (of_chat('{"isError": false, "content": ' + "[" * 60_000), ["unknown"]),
    "responses, an output": (of_responses(OUTPUT), ["unknown"]),
    "responses, MCP in an output": (
        of_responses(
            {**OUTPUT, "output": mcp(isError=False)}, {**OUTPUT, "output": mcp(isError=True)}
        ),
        ["ok", "failed"],
    ),
    "responses, a completed call": (of_responses({**MCP_CALL, "status": "completed"}), ["ok"]),
    "responses, a failed call": (of_responses({**MCP_CALL, "status": "failed"}), ["failed"]),
    "responses, a call with an error": (
        of_responses({**MCP_CALL, "status": "completed", "error": "no such city"}),
        ["failed"],
    ),
    "responses, a call without status": (of_responses(MCP_CALL), ["unknown"]),
    "responses, a type that is no text": (of_responses({**OUTPUT, "type": {}}), []),
    "a mixture": (
        of_messages({"is_error": False}, {}, {"is_error": True}, {"is_error": False}),
        ["ok", "unknown", "failed", "ok"],
    ),
    "before the last answer": (
        {"messages": [*of_messages({"is_error": True})["messages"], ANSWER, user("Thanks.")]},
        [],
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_result_is_ok_only_where_the_protocol_says_so(case: str) -> None:
    request, expected = STATES[case]

    assert states(request) == expected


def test_a_very_long_result_is_not_read_as_json() -> None:
    long = mcp(isError=False, structuredContent="x" * 2**20)

    assert states(of_chat(long)) == ["unknown"]
    assert states(of_messages({"content": long, "is_error": False})) == ["ok"]


def test_states_are_counted_and_none_is_hidden_by_another() -> None:
    request = json.dumps(STATES["a mixture"][0]).encode()

    assert in_words(tool_results(conversation_of(request).messages)) == "2 ok, 1 failed, 1 unknown"
    assert in_words([]) is None


def pass_over(kit: Kit, now: float) -> Found:
    while find_abandoned(kit.database, after_s=60.0, now=now):
        continue
    return {one for one in found(kit) if one[0] == "abandonment"}


CUT = msgspec.structs.replace(NEXT, outcome="cut")


@both_stores
@pytest.mark.parametrize(
    ("exchanges", "abandoned"),
    [
        ([FIRST, CUT], {("abandonment", "next", None)}),
        ([CALLING], {("abandonment", "first", None)}),
        ([FIRST, NEXT], set()),
        ([FIRST, CUT, EDITED], set()),
        (
            [FIRST, CUT, ask("late", 500.0, ANSWER, user("Are you there?"))],
            {("abandonment", "next", None)},
        ),
    ],
)
def test_a_session_that_was_left_in_the_middle_is_abandoned_after_the_window(
    kit: Kit, exchanges: list[Exchange], abandoned: Found
) -> None:
    store(kit, exchanges, now=1_000.0)

    assert pass_over(kit, 1_059.0) == set()
    assert pass_over(kit, 1_060.0) == abandoned
    assert pass_over(kit, 2_000.0) == abandoned


@pytest.mark.parametrize("evidence", [{}, {"began_at": "x"}])
def test_a_damaged_abandonment_stays_and_stops_nothing(kit: Kit, evidence: dict[str, str]) -> None:
    sessions = Sessions(held_out_rate=0.0)
    for one in (FIRST, CUT):
        kit.take(one, sessions=sessions, now=1_000.0)
    left = pass_over(kit, 2_000.0)
    with kit.database.write() as session:
        session.scalars(select(SignalRow)).one().evidence = evidence

    kit.take(EDITED, sessions=sessions, now=1_000.0)

    assert left <= found(kit)
    assert kit.counts("signal")["abandonment"] == 1


@both_stores
def test_a_record_that_comes_late_withdraws_the_abandonment(kit: Kit) -> None:
    sessions = Sessions(held_out_rate=0.0)
    for one in (FIRST, CUT):
        kit.take(one, sessions=sessions, now=1_000.0)
    assert len(pass_over(kit, 2_000.0)) == 1
    kit.take(EDITED, sessions=sessions, now=1_000.0)

    assert pass_over(kit, 3_000.0) == set()
    assert kit.counts("signal") == {"abandonment": 1, "abandonment_withdrawn": 1}
