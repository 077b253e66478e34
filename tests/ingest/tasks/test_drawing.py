"""From exchanges and outcomes in the store to groups of whole sessions."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from sidecar.store.models import ExchangeRow, TaskGroupRow
from support.ingest_kit import Kit
from support.task_kit import TaskKit

pytestmark = pytest.mark.both_stores


@pytest.fixture
def tasks(kit: Kit) -> TaskKit:
    return TaskKit(kit.database, size=2)


def test_finished_sessions_of_one_task_become_a_group(tasks: TaskKit, kit: Kit) -> None:
    good = tasks.session("good", success=True)
    bad = tasks.session("bad", success=False)
    tasks.session("other", success=True, task="exchange")

    assert tasks.follow() == 1
    (group,) = tasks.groups()
    members = tasks.members(group.group_id)
    assert (group.status, group.key_kind, group.adapter) == ("scored", "header", "base")
    assert (group.group_id[:3], len(group.group_id)) == ("tg_", 29)
    assert list(members) == ["bad", "good"]
    assert [(one.place, one.reward, one.source) for one in members.values()] == [
        (0, 0.0, "outcome"),
        (1, 1.0, "outcome"),
    ]
    assert [one.exchange_ids for one in members.values()] == [bad, good]
    with kit.database.read() as session:
        drawn = select(ExchangeRow.exchange_id).where(ExchangeRow.task_group_id == group.group_id)
        assert sorted(session.scalars(drawn)) == sorted([*good, *bad])
    assert tasks.follow() == 0
    counts = {"seen": 6, "enrolled_header": 3, "over": 3, "drawn": 1, "scored": 1}
    assert kit.counts("tasks") == counts


def test_a_session_is_in_no_group_until_its_outcome_is_told(tasks: TaskKit, kit: Kit) -> None:
    tasks.session("good", success=True)
    silent = tasks.session("silent")

    assert tasks.follow(after_s=4_000.0) == 0
    assert kit.counts("tasks")["without_outcome"] == 1

    tasks.told(silent[0], success=False)

    assert tasks.follow() == 1
    assert tasks.members("silent").get("silent") is None
    assert tasks.members()["silent"].reward == 0.0


def test_a_group_crosses_no_adapter_version_and_no_project(tasks: TaskKit) -> None:
    tasks.session("a", success=True)
    tasks.session("b", success=False, adapter="v1")
    tasks.session("c", success=False, project="shop")

    assert tasks.follow() == 0
    assert [one.excluded for one in tasks.members().values()] == [None, None, None]


def test_a_value_counts_once_a_session_of_a_user_of_the_project(kit: Kit) -> None:
    tasks = TaskKit(kit.database, size=4)
    played = tasks.session("played", origin="rehearsal")
    other = tasks.session("other", project="shop")
    for _ in range(10):
        tasks.told("h:nobody", target_kind="session", reward=1e12)
        tasks.told(played[-1], reward=1e12)
        tasks.told(other[-1], reward=1e12, project="shop")
    for number in range(4):
        last = tasks.session(f"s{number}")[-1]
        for _ in range(10):
            tasks.told(last, at=999.0, reward=1e9)
        tasks.told(last, reward=10.0 + 30.0 * number)

    assert tasks.follow() == 1
    members = tasks.members(tasks.groups()[0].group_id)
    assert [one.reward for one in members.values()] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])


def test_one_user_makes_no_group_alone_and_keeps_no_other_out(tasks: TaskKit) -> None:
    tasks.session("first", success=True)
    assert tasks.follow() == 0
    for number in range(130):
        tasks.session(f"own-{number}", success=number % 2 == 0, user="eager")

    assert tasks.follow() == 1
    assert "first" in tasks.members(tasks.groups()[0].group_id)
    assert tasks.follow() == 0


def test_equal_rewards_are_set_aside(tasks: TaskKit) -> None:
    tasks.session("a", success=True)
    tasks.session("b", success=True)

    assert tasks.follow() == 1
    (group,) = tasks.groups()
    assert (group.status, group.reason) == ("set_aside", "no_spread")


def test_a_corrected_outcome_renews_rewards_until_a_run(tasks: TaskKit, kit: Kit) -> None:
    good = tasks.session("a", success=True)
    tasks.session("b", success=True)
    assert tasks.follow() == 1

    tasks.told(good[-1], success=False)
    tasks.follow()

    (group,) = tasks.groups()
    assert (group.status, group.reason) == ("scored", None)
    assert {name: one.reward for name, one in tasks.members().items()} == {"a": 0.0, "b": 1.0}

    with kit.database.write() as session:
        session.execute(update(TaskGroupRow).values(status="claimed"))
    tasks.told(good[-1], success=True)
    tasks.follow()

    assert tasks.members()["a"].reward == 0.0
    assert kit.counts("tasks")["corrected"] == 1


def test_what_must_not_be_learned_from_is_counted_by_reason(tasks: TaskKit, kit: Kit) -> None:
    tasks.session("held", success=True, held_out=True)
    tasks.session("masked", success=True, untrainable_reason="cut")
    mixed = tasks.turn("mixed")
    tasks.told(tasks.turn("mixed", parent=mixed, adapter="v2"), success=True)
    for number in range(8):
        last = tasks.turn("merged", user=f"u{number}")
    tasks.told(last, success=True)

    assert tasks.follow() == 0
    assert {name: one.excluded for name, one in tasks.members().items()} == {
        "held": "held_out",
        "masked": "untrainable",
        "merged": "too_many_callers",
        "mixed": "several_adapters",
    }
    counts = kit.counts("tasks")
    assert counts == {
        "seen": 14,
        "enrolled_header": 4,
        "held_out": 1,
        "untrainable": 1,
        "too_many_callers": 1,
        "several_adapters": 1,
    }


def test_a_late_turn_reopens_a_session_once_before_the_draw(tasks: TaskKit, kit: Kit) -> None:
    first = tasks.turn("long")
    tasks.told(first, success=True)
    tasks.follow()
    assert tasks.members()["long"].over_at == 1_000.0

    second = tasks.turn("long", parent=first)
    tasks.follow()
    assert tasks.members()["long"].over_at is None

    tasks.told(second, success=False)
    tasks.follow()
    tasks.turn("long", parent=second)  # the second time it stays over
    tasks.follow()
    tasks.session("other", success=True)

    assert tasks.follow() == 1
    tasks.turn("long", parent=second)
    tasks.follow()
    member = tasks.members()["long"]
    assert (member.exchange_ids, member.reward) == ([first, second], 0.0)
    counts = kit.counts("tasks")
    assert (counts["reopened"], counts["late_turns"]) == (1, 2)


def test_a_session_without_an_outcome_is_over_when_done_or_by_time(kit: Kit) -> None:
    tasks = TaskKit(kit.database, size=2, learn="ruler")
    tasks.session("silent")
    done = tasks.session("done")
    tasks.told(done[-1], done=True)

    assert tasks.follow() == 0
    assert tasks.members()["silent"].over_at is None
    assert tasks.follow(after_s=3_600.0) == 1
    (group,) = tasks.groups()
    assert group.status == "waiting"
    assert {one.reward for one in tasks.members(group.group_id).values()} == {None}


def test_first_messages_alike_but_for_names_make_a_group_where_they_may(kit: Kit) -> None:
    def ask(tasks: TaskKit, name: str, order: str, success: bool) -> None:
        content = [{"role": "user", "content": f"Where is my order {order}?"}]
        body = {"model": "smollm", "messages": content}
        ids = tuple(map(ord, order))
        turn = tasks.turn(name, task="", request=body, prompt_token_ids=ids)
        tasks.told(turn, success=success)

    strict = TaskKit(kit.database, size=2, key="prompt")
    ask(strict, "a", "A-1", success=True)
    ask(strict, "b", "B-2", success=False)
    assert strict.follow() == 0

    loose = TaskKit(kit.database, size=2, key="template")
    ask(loose, "c", "C-3", success=True)
    ask(loose, "d", "D-44", success=False)
    ask(loose, "e", "C-3", success=False)

    assert loose.follow() == 1
    kinds = {name: one.key_kind for name, one in loose.members().items()}
    # Two sessions asked for C-3: a prompt that repeats.
    assert {name: kinds[name] for name in "cde"} == {"c": "prompt", "d": "template", "e": "prompt"}
    assert list(loose.members(loose.groups()[0].group_id)) == ["c", "e"]
