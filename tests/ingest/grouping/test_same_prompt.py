"""Answers that exist already: joined to one group where they differ by chance alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingest.grouping.same_prompt import MIN_FREE, prompt_key
from ingest.grouping.selection import group_id_of
from ingest.intake.choose import choose_backlog, choose_new
from ingest.retention.deletion import delete_exchanges
from ingest.store.groups import load_group, mark_sampled
from sidecar.records import Exchange, Sampling
from support.ingest_kit import REQUEST, Kit

SESSION = "m:s"


def again(kit: Kit, name: str, **changes: Any) -> Exchange:
    """One more answer to the prompt of the session."""
    return kit.exchange(
        name, **{"session_key": SESSION, "choices": (kit.choice(f"by {name}"),), **changes}
    )


def choose(kit: Kit, *, now: float = 2.0, **rules: Any) -> None:
    rules = {"join_served": "session", **rules}
    choose_new(kit.database, kit.rules(**rules), model="smollm", limit=100, now=now)


def contents(kit: Kit, name: str) -> list[str]:
    """What the answers of this exchange's group say; empty: it has none."""
    with kit.database.read() as session:
        group = load_group(session, group_id_of(name))
    assert group is None or [one.index for one in group.answers] == [*range(len(group.answers))]
    return [json.loads(one.message)["content"] for one in group.answers] if group else []


@pytest.mark.both_stores
def test_a_regenerated_answer_is_an_answer_of_the_first_ones_group(kit: Kit) -> None:
    kit.store(again(kit, "a"), again(kit, "b"))

    choose(kit)

    assert contents(kit, "a") == ["by a", "by b"]
    assert [kit.stored(name).selection for name in "ab"] == ["chosen", "joined"]
    assert kit.counts("selection") == {"chosen": 1, "joined": 1}
    answers = kit.group(group_id_of("a")).answers
    assert [one.exchange_id for one in answers] == [None, "b"]


@pytest.mark.both_stores
def test_an_answer_that_comes_later_joins_the_group_while_it_is_sampled(kit: Kit) -> None:
    kit.store(again(kit, "a"))
    choose(kit)
    kit.store(again(kit, "b"))
    choose(kit, now=3.0)

    assert contents(kit, "a") == ["by a", "by b"]
    assert kit.stored("b").selection == "joined"

    with kit.database.write() as session:
        mark_sampled(session, group_id_of("a"))
    kit.store(again(kit, "c"))
    choose(kit, now=4.0)

    assert contents(kit, "a") == ["by a", "by b"]
    assert (kit.stored("c").selection, contents(kit, "c")) == ("chosen", ["by c"])


def test_what_was_left_out_for_its_cost_joins_a_later_group(kit: Kit) -> None:
    kit.store(again(kit, "a"))
    choose(kit, rate=0.0)
    kit.store(again(kit, "b"))
    choose(kit, now=3.0)

    assert contents(kit, "b") == ["by b", "by a"]
    assert [kit.stored(name).selection for name in "ab"] == ["joined", "chosen"]
    assert kit.counts("selection") == {"chosen": 1, "joined": 1}


@pytest.mark.both_stores
def test_enough_served_answers_are_a_group_without_a_candidate(kit: Kit) -> None:
    names = [f"e{at}" for at in range(MIN_FREE)]
    kit.store(*(again(kit, name) for name in names[:-1]))
    choose(kit, rate=0.0, size=8)
    assert kit.group_count() == 0
    kit.store(again(kit, names[-1]))

    choose(kit, rate=0.0, size=8, now=3.0)

    assert kit.row(group_id_of(names[-1])).status == "sampled"
    assert len(contents(kit, names[-1])) == MIN_FREE


def test_free_answers_that_are_all_alike_are_set_aside_before_a_judge_is_asked(kit: Kit) -> None:
    kit.store(*(again(kit, f"e{at}", choices=(kit.choice("same"),)) for at in range(4)))

    choose(kit, rate=0.0, size=8)

    row = kit.row(group_id_of("e0"))
    assert (row.status, row.reason) == ("set_aside", "identical_answers")


def test_a_group_takes_no_more_exchanges_than_it_has_room_for(kit: Kit) -> None:
    kit.store(*(again(kit, f"e{at}") for at in range(6)))

    choose(kit, size=4)

    assert contents(kit, "e0") == [f"by e{at}" for at in range(4)]
    assert contents(kit, "e4") == ["by e4", "by e5"]


def test_the_backlog_is_joined_when_there_is_room(kit: Kit) -> None:
    kit.store(again(kit, "a"), again(kit, "b"))
    choose(kit, max_pending_groups=0)
    assert [kit.stored(name).selection for name in "ab"] == ["backlog", "backlog"]

    choose_backlog(kit.database, kit.rules(join_served="session"), model="smollm", now=3.0)

    assert sorted(contents(kit, "b") or contents(kit, "a")) == ["by a", "by b"]
    assert kit.counts("selection") == {"chosen": 1, "joined": 1}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"prompt_token_ids": (1, 9, 9, 5)}, id="another-prompt"),
        pytest.param({"adapter": "smollm--v2"}, id="another-adapter"),
        pytest.param({"project": "other"}, id="another-project"),
        pytest.param({"public_model": "other"}, id="another-model"),
        pytest.param({"session_key": "m:other"}, id="another-session"),
        pytest.param({"request": {**REQUEST, "max_tokens": 15}}, id="another-length"),
        pytest.param({"request": {**REQUEST, "stop": ["x"]}}, id="another-end"),
        pytest.param({"request": {**REQUEST, "temperature": 0.5}}, id="another-temperature"),
        pytest.param({"request": {**REQUEST, "odd": 1}}, id="an-unknown-field"),
        pytest.param({"sampling": Sampling(temperature=1.0, seed=1)}, id="a-seed"),
        pytest.param({"sampling": Sampling(temperature=1.0, top_p=0.5)}, id="cut-sampling"),
        pytest.param({"untrainable_reason": "no_logprobs"}, id="no-log-probabilities"),
    ],
)
def test_what_differs_by_more_than_chance_is_not_joined(kit: Kit, changes: dict[str, Any]) -> None:
    kit.route(champion="base", canary="smollm--v2")
    kit.store(again(kit, "a"), again(kit, "b", **changes))

    choose(kit)

    assert contents(kit, "a") == ["by a"]
    assert kit.stored("b").selection != "joined"


def test_what_is_held_out_is_not_joined(kit: Kit) -> None:
    kit.store(again(kit, "a"), held_out=True)
    kit.store(again(kit, "b"))

    choose(kit)

    assert contents(kit, "b") == ["by b"]
    assert kit.stored("a").selection == "held_out"


def test_sessions_of_a_project_are_joined_only_when_asked_for(kit: Kit) -> None:
    kit.store(again(kit, "a"), again(kit, "b", session_key="m:other"))

    choose(kit, join_served="project")

    assert contents(kit, "a") == ["by a", "by b"]


def test_nothing_is_joined_when_it_is_off(kit: Kit) -> None:
    kit.store(again(kit, "a"), again(kit, "b"))

    choose(kit, join_served="off")

    assert [contents(kit, name) for name in "ab"] == [["by a"], ["by b"]]


def test_a_retry_of_a_turn_is_no_second_answer(kit: Kit) -> None:
    kit.store(again(kit, "a", turn_id="t"), again(kit, "b", turn_id="t"))

    choose(kit)

    assert sorted([contents(kit, "a"), contents(kit, "b")]) == [[], ["by b"]]


@pytest.mark.both_stores
def test_what_is_forgotten_takes_the_groups_with_it_that_hold_its_answers(kit: Kit) -> None:
    kit.store(again(kit, "a"), again(kit, "b", session_key="m:other"))
    choose(kit, join_served="project")

    done = delete_exchanges(kit.database, ["b"], why="forgotten", now=3.0)

    assert dict(done.groups) == {"sampling": 1}
    assert kit.group_count() == 0
    assert kit.stored("a").selection == "chosen"


def test_the_key_of_a_prompt_does_not_depend_on_how_the_request_is_sent(kit: Kit) -> None:
    plain = again(kit, "a")
    streamed = again(kit, "b", request={**dict(reversed(REQUEST.items())), "stream": True, "n": 2})

    assert prompt_key(plain) == prompt_key(streamed) is not None
