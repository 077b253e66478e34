"""Feedback and its exchange: late, before, repeated, contradictory, of another project."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from ingest.feedback import store
from ingest.feedback.store import Annotations, annotations_of, annotations_of_session
from ingest.intake.choose import Sessions
from sidecar.feedback import Feedback, encode_feedback
from sidecar.records import Exchange, Timings
from sidecar.store.models import DeadLetterRow, FeedbackRow
from support import api_keys
from support.ingest_kit import Kit, make_feedback

EITHER_ORDER = pytest.mark.parametrize("first", ["exchange", "feedback"])


def take_each(
    kit: Kit,
    first: str,
    exchange: Exchange,
    feedback: Feedback,
    sessions: Sessions | None = None,
) -> None:
    for record in (exchange, feedback) if first == "exchange" else (feedback, exchange):
        kit.take(record, sessions=sessions)


def told(kit: Kit, name: str = "e1") -> Annotations:
    with kit.database.read() as session:
        return annotations_of(session, [name])[name]


def scores(found: Annotations) -> list[tuple[float | None, bool]]:
    return [(one.score, one.counts) for one in found.feedback]


@pytest.mark.both_stores
@EITHER_ORDER
def test_feedback_is_joined_whichever_comes_first(kit: Kit, first: str) -> None:
    take_each(kit, first, kit.exchange("e1"), make_feedback("f1"))

    assert scores(told(kit)) == [(1.0, True)]
    assert kit.counts("feedback") == {"stored_feedback": 1, "joined": 1}


def test_feedback_in_the_batch_of_its_exchange_is_joined(kit: Kit) -> None:
    consumed = kit.take(make_feedback("f1"), kit.exchange("e1"), make_feedback("f2", score=0.0))

    assert (consumed.stored, consumed.feedback, consumed.read) == (1, 2, 3)
    assert kit.counts("feedback") == {"stored_feedback": 2, "joined": 2}


@pytest.mark.both_stores
def test_a_repeated_delivery_changes_nothing(kit: Kit) -> None:
    batch: list[Exchange | Feedback] = [
        kit.exchange("e1"),
        make_feedback("f1"),
        make_feedback("f1", received_at=2.0),
    ]

    kit.take(*batch)
    kit.take(*batch)

    assert scores(told(kit)) == [(1.0, True)]
    assert kit.counts("feedback") == {"stored_feedback": 1, "joined": 1, "repeated": 3}


def test_all_contradictory_feedback_is_kept_and_the_newest_of_a_source_counts(kit: Kit) -> None:
    kit.take(
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
    kit.take(kit.exchange("e1"), *loud, *many, *app_says)

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
    kit.take(*turns, *quiet, *loud)

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
    return {row.feedback_id: row.session_id for row in kit.scalars(select(FeedbackRow))}


@pytest.mark.both_stores
def test_an_outcome_of_a_task_is_of_its_newest_session_that_had_begun(kit: Kit) -> None:
    turns = [turn(kit, name, at) for name, at in (("a1", 10.0), ("b1", 20.0), ("a2", 30.0))]
    later, other = turn(kit, "c1", 40.0), turn(kit, "x1", 21.0, project="other")

    kit.take(outcome("early", 5.0), outcome("waits", 25.0), *turns, other)
    kit.take(later)
    kit.take(outcome("first", 15.0), outcome("second", 35.0), outcome("third", 45.0))
    kit.take(outcome("elsewhere", 35.0, project="mail"))

    assert joined_to(kit) == {
        "early": None,
        "waits": "h:b",
        "first": "h:a",
        "second": "h:b",
        "third": "h:c",
        "elsewhere": None,
    }


def test_an_outcome_of_a_session_corrects_one_of_its_task(kit: Kit) -> None:
    kit.take(turn(kit, "a1", 1.0), outcome("f1", 2.0, success=False, done=True))
    kit.take(outcome("f2", 3.0, target="h:a", target_kind="session", success=True))

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
    kit.take(kit.exchange("e1"), early, *flood)

    assert told(kit).summary()["feedback_score"] == 0.0


def test_an_idempotency_key_with_another_content_is_put_aside_and_counted(kit: Kit) -> None:
    other = make_feedback("f1", score=-1.0)

    kit.take(kit.exchange("e1"), make_feedback("f1"))
    kit.take(other)

    assert scores(told(kit)) == [(1.0, True)]
    assert kit.counts("feedback")["conflict"] == 1
    (letter,) = kit.scalars(select(DeadLetterRow))
    assert letter.payload == encode_feedback(other)


@EITHER_ORDER
@pytest.mark.parametrize(
    ("kind", "target"),
    [("exchange", "e1"), ("session", "h:shop/s"), ("session", "e1"), ("trace", "ab" * 16)],
)
def test_no_key_reaches_another_project(kit: Kit, first: str, kind: str, target: str) -> None:
    theirs = kit.exchange(
        "e1",
        project="shop",
        session_key="h:shop/s" if target != "e1" else "m:1",
        trace_id="ab" * 16,
    )
    ours = make_feedback("f1", target, target_kind=kind, project="mail")

    take_each(kit, first, theirs, ours)

    assert told(kit) == Annotations()
    assert "joined" not in kit.counts("feedback")
    (row,) = kit.scalars(select(FeedbackRow))
    assert (row.exchange_id, row.session_id) == (None, None)


@EITHER_ORDER
@pytest.mark.parametrize(("kind", "target"), [("session", "h:s"), ("trace", "cd" * 16)])
def test_sessions_and_traces_are_targets_too(kit: Kit, first: str, kind: str, target: str) -> None:
    exchange = kit.exchange("e1", session_key="h:s", trace_id="cd" * 16)
    outcome = make_feedback(
        "f1", target, target_kind=kind, kind="outcome", score=None, success=True
    )

    take_each(kit, first, exchange, outcome)

    assert told(kit).summary()["success"] is True
    with kit.database.read() as session:
        assert [one.target for one in annotations_of_session(session, "h:s").feedback] == [target]


@pytest.mark.both_stores
def test_a_session_that_becomes_part_of_another_keeps_its_make_feedback(kit: Kit) -> None:
    opening = {"messages": [{"role": "user", "content": "How do I return a parcel to you?"}]}
    answer = {"role": "assistant", "content": "served"}
    later = {"messages": [*opening["messages"], answer, {"role": "user", "content": "And shoes?"}]}
    sessions = Sessions(held_out_rate=0.0)

    kit.take(kit.exchange("late", request=later), sessions=sessions)
    kit.take(make_feedback("f1", "late", target_kind="session"), sessions=sessions)
    kit.take(kit.exchange("early", request=opening), sessions=sessions)

    with kit.database.read() as session:
        assert len(annotations_of_session(session, "early").feedback) == 1
        assert annotations_of_session(session, "late") == Annotations()


def test_feedback_that_no_store_can_hold_is_put_aside_alone(kit: Kit) -> None:
    bad = make_feedback("f1", comment="\0")

    consumed = kit.take(bad, make_feedback("f2"), kit.exchange("e1"))

    assert (consumed.poison, consumed.feedback, consumed.stored) == (1, 1, 1)
    assert scores(told(kit)) == [(1.0, True)]


@EITHER_ORDER
def test_the_second_name_of_a_session_is_a_target_too(kit: Kit, first: str) -> None:
    trace = "cd" * 16
    begun = kit.exchange("e1", session_key="h:one", trace_id=trace)
    other = kit.exchange("e2", session_key="h:two", trace_id=trace)
    sessions = Sessions(held_out_rate=0.0)
    kit.take(begun, sessions=sessions)

    take_each(kit, first, other, make_feedback("f1", "h:two", target_kind="session"), sessions)

    (row,) = kit.scalars(select(FeedbackRow))
    assert (row.exchange_id, row.session_id) == ("e2", "h:one")
    assert kit.counts("feedback") == {"stored_feedback": 1, "joined": 1}
