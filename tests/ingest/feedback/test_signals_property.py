"""Whatever the conversations, the order of arrival and the batches: the same signals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from sqlalchemy import select

from ingest.intake.choose import Sessions
from sidecar.records import Exchange, Timings
from sidecar.store.models import ExchangeRow, SignalRow
from support.ingest_kit import Kit, make_choice, make_exchange

Found = set[tuple[str, str, str | None, str]]
"""Kind, the exchange that the signal is about, the exchange that shows it, and the session."""
ERROR, FINE = "Error: no such parcel", "the parcel is in Bonn"
AGAIN, EDITED, REWORDED, GOES_ON = "asked again", "edited", "reply in other words", "goes on"


def conversation(name: str, moves: list[tuple[str, bool, bool]]) -> list[Exchange]:
    """Exchanges of one conversation, in the order in which they began.

    moves: what each request does, whether its answer comes, and whether a tool failed before it.
    """
    messages = [{"role": "user", "content": f"Where is parcel {name} of the customer today?"}]
    before: list[dict[str, Any]] = []
    reply: dict[str, Any] | None = None
    times = 0
    """How often the last messages were asked."""
    found: list[Exchange] = []
    for number, (move, answers, failed) in enumerate(moves):
        if reply is not None and move in (GOES_ON, REWORDED):
            call = reply["tool_calls"][0]["id"]
            said = reply
            if move == REWORDED and times == 1:  # else it may be the answer of either
                said = {**reply, "content": f"{reply['content']} (cut)"}
                said["tool_calls"] = [{**reply["tool_calls"][0], "id": f"{call}-again"}]
                call = f"{call}-again"
            result = {"role": "tool", "tool_call_id": call, "content": ERROR if failed else FINE}
            asked = {"role": "user", "content": f"Step {number} of the work with parcel {name}."}
            before = [*messages, said, result]
            messages = [*before, asked]
            reply, times = None, 0
        elif move == EDITED and found and messages[-1]["role"] == "user":
            text = f"{messages[-1]['content']} Please, {number}."
            messages = [*messages[:-1], {"role": "user", "content": text}]
            reply, times = None, 0
        own = f"{name}-{number}"
        call_of = {"id": own, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        answer = {"role": "assistant", "content": f"Looking: {own}", "tool_calls": [call_of]}
        choices = (make_choice(message=json.dumps(answer).encode(), finish_reason="tool_calls"),)
        found.append(
            make_exchange(
                own,
                request={"messages": messages},
                timings=Timings(started_at=10.0 * number, total_s=1.0),
                turn_id=own,
                session_key=f"h:{name}",
                outcome="ok" if answers else "upstream_error",
                choices=choices if answers else (),
            )
        )
        times += 1
        if answers:
            reply = answer
    return found


MOVES = st.tuples(
    st.sampled_from([GOES_ON, GOES_ON, AGAIN, EDITED, REWORDED]),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
)


def take(kit: Kit, batches: list[list[Exchange]]) -> None:
    sessions = Sessions(held_out_rate=0.0)
    for batch in batches:
        kit.take(*batch, sessions=sessions, now=1_000.0)


def stored(kit: Kit) -> tuple[Found, dict[str, str | None]]:
    """Return the stored signals, and the parent of each exchange."""
    with kit.database.read() as session:
        rows = session.scalars(select(SignalRow)).all()
        parents = {row.exchange_id: row.parent_id for row in session.scalars(select(ExchangeRow))}
        return {(row.kind, row.exchange_id, row.by_id, row.session_id) for row in rows}, parents


def batches_of(data: st.DataObject, order: list[Exchange]) -> Iterator[list[Exchange]]:
    while order:
        size = data.draw(st.integers(1, len(order)))
        yield order[:size]
        order = order[size:]


@pytest.mark.both_stores
@settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_signals_are_those_of_the_order_of_the_beginnings(kit: Kit, data: st.DataObject) -> None:
    exchanges = [
        one
        for name in ("a", "b")
        for one in conversation(name, data.draw(st.lists(MOVES, min_size=1, max_size=6)))
    ]
    with kit.emptied():
        take(kit, [[one] for one in exchanges])
        expected, parents = stored(kit)
    order = list(data.draw(st.permutations(exchanges)))
    with kit.emptied():
        take(kit, list(batches_of(data, order)))
        found, now = stored(kit)

    assert now == parents, [one.exchange_id for one in order]
    assert found == expected
