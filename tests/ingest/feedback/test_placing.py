"""Feedback and its exchange: late, before, repeated, contradictory, of another project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select

from ingest.feedback import store
from ingest.feedback.store import Told, told_of, told_of_session
from ingest.intake.bus import BusReader
from ingest.intake.choose import Sessions
from ingest.intake.consume import Consumed, consume
from sidecar.feedback import Feedback, encode_feedback
from sidecar.records import Exchange, Timings
from sidecar.store.models import DeadLetterRow, FeedbackRow
from support import api_keys
from support.ingest_kit import FillBus, Kit, make_feedback, packed

Record = Exchange | Feedback


def take(kit: Kit, *records: Record, sessions: Sessions | None = None) -> Consumed:
    return drain(kit, kit.MemoryBus([payload for _, payload in packed(records)]), sessions)


def drain(kit: Kit, bus: BusReader, sessions: Sessions | None = None) -> Consumed:
    consumed = Consumed()
    while bus.lag():
        consumed += consume(
            bus,
            kit.database,
            limit=100,
            sessions=sessions or Sessions(held_out_rate=0.0),
            now=5.0,
        )
    return consumed


def told(kit: Kit, name: str = "e1") -> Told:
    with kit.database.read() as session:
        return told_of(session, [name])[name]


def scores(found: Told) -> list[tuple[float | None, bool]]:
    return [(one.score, one.counts) for one in found.feedback]


@pytest.mark.both_stores
@pytest.mark.parametrize("first", ["exchange", "feedback"])
def test_feedback_is_joined_whichever_comes_first(kit: Kit, first: str) -> None:
    records: list[Sequence[Record]] = [[kit.exchange("e1")], [make_feedback("f1")]]

    for batch in records if first == "exchange" else records[::-1]:
        take(kit, *batch)

    assert scores(told(kit)) == [(1.0, True)]
    assert kit.counts("feedback") == {"stored_feedback": 1, "joined": 1}


def test_feedback_in_the_batch_of_its_exchange_is_joined(kit: Kit) -> None:
    consumed = take(kit, make_feedback("f1"), kit.exchange("e1"), make_feedback("f2", score=0.0))

    assert (consumed.stored, consumed.feedback, consumed.read) == (1, 2, 3)
    assert kit.counts("feedback") == {"stored_feedback": 2, "joined": 2}


@pytest.mark.both_stores
def test_a_repeated_delivery_changes_nothing(kit: Kit) -> None:
    batch: list[Record] = [
        kit.exchange("e1"),
        make_feedback("f1"),
        make_feedback("f1", received_at=2.0),
    ]

    take(kit, *batch)
    take(kit, *batch)

    assert scores(told(kit)) == [(1.0, True)]
    assert kit.counts("feedback") == {"stored_feedback": 1, "joined": 1, "repeated": 3}


def test_all_contradictory_feedback_is_kept_and_the_newest_of_a_source_counts(kit: Kit) -> None:
    take(
        kit,
        kit.exchange("e1"),
        make_feedback("f3", score=-1.0, received_at=3.0),
        make_feedback("f1", score=1.0, received_at=1.0),
        make_feedback("f2", score=0.5, received_at=2.0, source="user:eve"),
    )

    found = told(kit)

    assert scores(found) == [(1.0, False), (0.5, True), (-1.0, True)]
    assert found.summary()["feedback_score"] == -0.25


@pytest.mark.both_stores
def test_a_key_has_one_voice_unless_its_scope_lets_it_speak_for_many(kit: Kit) -> None:
    def said(number: int, key: str, score: float) -> Feedback:
        at = float(number)
        return make_feedback(
            f"f{number}", key_id=key, source=f"user-{number}", score=score, received_at=at
        )

    app, _ = api_keys.create(kit.database, scopes=frozenset({"infer"}))
    forum, _ = api_keys.create(kit.database, scopes=frozenset({"infer", "voices"}))
    loud = [said(number, "loud", 1.0) for number in range(60)]
    many = [said(100 + number, forum, -1.0) for number in range(2)]
    app_says = [said(200, app, 0.5), said(201, app, -1.0)]
    take(kit, kit.exchange("e1"), *loud, *many, *app_says)

    counting = [one.feedback_id for one in told(kit).feedback if one.counts]
    assert counting == ["f59", "f100", "f101", "f201"]
    assert told(kit).summary()["feedback_score"] == (1.0 - 1.0 - 1.0 - 1.0) / 4


def test_a_key_has_one_voice_on_a_session_whatever_name_it_gives_it(kit: Kit) -> None:
    def said(number: int, key: str, target: str, score: float) -> Feedback:
        return make_feedback(
            f"f{number}", target=target, target_kind="session", key_id=key, score=score
        )

    turns = [kit.exchange(f"e{n}", session_key="h:order-1") for n in range(1, 6)]
    quiet = [said(number, f"key-{number}", "h:order-1", -1.0) for number in range(3)]
    loud = [said(10 + n, "loud", name, 1.0) for n, name in enumerate(("h:order-1", "e1", "e2"))]
    take(kit, *turns, *quiet, *loud)

    assert told(kit).summary()["feedback_score"] == (-1.0 - 1.0 - 1.0 + 1.0) / 4


def outcome(name: str, at: float, **changes: Any) -> Feedback:
    """An outcome of the task "refund"."""
    changes = {"kind": "outcome", "score": None, "reward": 0.5, "received_at": at, **changes}
    return make_feedback(name, **{"target": "refund", "target_kind": "task", **changes})


def turn(kit: Kit, name: str, at: float, **changes: Any) -> Exchange:
    """A turn of the session that its name begins with, at a time, of the task "refund"."""
    changes = {"timings": Timings(started_at=at), "session_key": f"h:{name[0]}", **changes}
    return kit.exchange(name, task="refund", **changes)


def joined_to(kit: Kit) -> dict[str, str | None]:
    with kit.database.read() as session:
        return {row.feedback_id: row.session_id for row in session.scalars(select(FeedbackRow))}


@pytest.mark.both_stores
def test_an_outcome_of_a_task_is_of_its_newest_session_that_had_begun(kit: Kit) -> None:
    turns = [turn(kit, name, at) for name, at in (("a1", 10.0), ("b1", 20.0), ("a2", 30.0))]
    later, other = turn(kit, "c1", 40.0), turn(kit, "x1", 21.0, project="other")

    take(kit, outcome("early", 5.0), outcome("waits", 25.0), *turns, other)
    take(kit, later)
    take(kit, outcome("first", 15.0), outcome("second", 35.0), outcome("third", 45.0))
    take(kit, outcome("elsewhere", 35.0, project="mail"))

    assert joined_to(kit) == {
        "early": None,
        "waits": "h:b",
        "first": "h:a",
        "second": "h:b",
        "third": "h:c",
        "elsewhere": None,
    }


def test_an_outcome_of_a_session_corrects_one_of_its_task(kit: Kit) -> None:
    take(kit, turn(kit, "a1", 1.0), outcome("f1", 2.0, success=False, done=True))
    take(kit, outcome("f2", 3.0, target="h:a", target_kind="session", success=True))

    found = told(kit, "a1")
    assert [(one.success, one.done, one.counts) for one in found.feedback] == [
        (False, True, False),
        (True, None, True),
    ]
    assert found.summary()["success"] is True


def test_a_flood_of_one_key_keeps_no_voice_out(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST", 10)
    early = make_feedback("f0", key_id="app", score=-1.0, received_at=1.0)
    flood = [
        make_feedback(f"l{n:02}", key_id="loud", source=f"s{n}", received_at=2.0 + n)
        for n in range(20)
    ]
    take(kit, kit.exchange("e1"), early, *flood)

    assert told(kit).summary()["feedback_score"] == 0.0


def test_an_idempotency_key_with_another_content_is_put_aside_and_counted(kit: Kit) -> None:
    other = make_feedback("f1", score=-1.0)

    take(kit, kit.exchange("e1"), make_feedback("f1"))
    take(kit, other)

    assert scores(told(kit)) == [(1.0, True)]
    assert kit.counts("feedback")["conflict"] == 1
    with kit.database.read() as session:
        letter = session.scalars(select(DeadLetterRow)).one()
    assert letter.payload == encode_feedback(other)


@pytest.mark.parametrize("first", ["exchange", "feedback"])
@pytest.mark.parametrize(
    ("kind", "target"),
    [("exchange", "e1"), ("session", "h:shop/s"), ("session", "e1"), ("trace", "ab" * 16)],
)
def test_no_key_of_another_project_reaches_an_exchange(
    kit: Kit, first: str, kind: str, target: str
) -> None:
    theirs = kit.exchange(
        "e1",
        project="shop",
        session_key="h:shop/s" if target != "e1" else "m:1",
        trace_id="ab" * 16,
    )
    records: list[Record] = [theirs, make_feedback("f1", target, target_kind=kind, project="mail")]

    for record in records if first == "exchange" else records[::-1]:
        take(kit, record)

    assert told(kit) == Told()
    assert "joined" not in kit.counts("feedback")
    with kit.database.read() as session:
        row = session.scalars(select(FeedbackRow)).one()
    assert (row.exchange_id, row.session_id) == (None, None)


@pytest.mark.parametrize("first", ["exchange", "feedback"])
@pytest.mark.parametrize(("kind", "target"), [("session", "h:s"), ("trace", "cd" * 16)])
def test_sessions_and_traces_are_targets_too(kit: Kit, first: str, kind: str, target: str) -> None:
    exchange = kit.exchange("e1", session_key="h:s", trace_id="cd" * 16)
    outcome = make_feedback(
        "f1", target, target_kind=kind, kind="outcome", score=None, success=True
    )

    records: list[Record] = [exchange, outcome]

    for record in records if first == "exchange" else records[::-1]:
        take(kit, record)

    assert told(kit).summary()["success"] is True
    with kit.database.read() as session:
        assert [one.target for one in told_of_session(session, "h:s").feedback] == [target]


@pytest.mark.both_stores
def test_a_session_that_becomes_part_of_another_keeps_its_make_feedback(kit: Kit) -> None:
    opening = {"messages": [{"role": "user", "content": "How do I return a parcel to you?"}]}
    answer = {"role": "assistant", "content": "served"}
    later = {"messages": [*opening["messages"], answer, {"role": "user", "content": "And shoes?"}]}
    sessions = Sessions(held_out_rate=0.0)

    take(kit, kit.exchange("late", request=later), sessions=sessions)
    take(kit, make_feedback("f1", "late", target_kind="session"), sessions=sessions)
    take(kit, kit.exchange("early", request=opening), sessions=sessions)

    with kit.database.read() as session:
        assert len(told_of_session(session, "early").feedback) == 1
        assert told_of_session(session, "late") == Told()


def test_feedback_comes_through_every_bus(filled_bus: FillBus, kit: Kit) -> None:
    bus = filled_bus([kit.exchange("e1"), make_feedback("f1"), make_feedback("f2", "e2")])

    drain(kit, bus)

    assert scores(told(kit)) == [(1.0, True)]
    assert kit.counts("feedback") == {"stored_feedback": 2, "joined": 1}
    assert kit.counts("consume") == {"stored": 1}


def test_feedback_that_no_store_can_hold_is_put_aside_alone(kit: Kit) -> None:
    bad = make_feedback("f1", comment="\0")

    consumed = take(kit, bad, make_feedback("f2"), kit.exchange("e1"))

    assert (consumed.poison, consumed.feedback, consumed.stored) == (1, 1, 1)
    assert scores(told(kit)) == [(1.0, True)]


@pytest.mark.parametrize("first", ["exchange", "feedback"])
def test_the_second_name_of_a_session_is_a_target_too(kit: Kit, first: str) -> None:
    trace = "cd" * 16
    begun = kit.exchange("e1", session_key="h:one", trace_id=trace)
    other = kit.exchange("e2", session_key="h:two", trace_id=trace)
    sessions = Sessions(held_out_rate=0.0)
    take(kit, begun, sessions=sessions)
    records: list[Record] = [other, make_feedback("f1", "h:two", target_kind="session")]

    for record in records if first == "exchange" else records[::-1]:
        take(kit, record, sessions=sessions)

    with kit.database.read() as session:
        row = session.scalars(select(FeedbackRow)).one()
    assert (row.exchange_id, row.session_id) == ("e2", "h:one")
    assert kit.counts("feedback") == {"stored_feedback": 1, "joined": 1}
