from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import select, update

from ingest.intake.choose import count_pending
from ingest.records import Answer, Disagreement, Group
from ingest.store.groups import (
    append_answers,
    claim_groups,
    load_group,
    load_scored_group,
    mark_sampled,
    mark_scored,
    release_group,
    retry_sampling,
    sampling_attempts,
    save_group,
    set_aside,
)
from ingest.store.sessions import count_by_session
from sidecar.store.models import AnswerRow
from support.ingest_kit import Kit


def answer(kit: Kit, content: str, **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "index": 0,
        "origin": "sampled",
        "message": kit.message(content),
        "finish_reason": "stop",
        "token_ids": (7, 2),
        "logprobs": (-0.5, -0.25),
        "temperature": 0.5,
    }
    return Answer(**{**values, **changes})


def claim(kit: Kit, now: float, *, status: str = "sampling", limit: int = 10) -> list[str]:
    with kit.database.write() as session:
        return claim_groups(session, status, limit=limit, now=now, lease_s=30.0)


@pytest.mark.both_stores
def test_a_group_comes_back_as_it_went_in(kit: Kit) -> None:
    exchange = kit.exchange("e1")
    kit.store(exchange)
    group = Group(
        group_id="g-1",
        exchange_id="e1",
        session_key="m:e1",
        session_id="e0",
        adapter="a",
        request=exchange.request,
        prompt_token_ids=exchange.prompt_token_ids,
        answers=(
            answer(kit, "x", origin="served", untrainable_reason="top_p"),
            answer(kit, "y", index=1),
        ),
    )

    with kit.database.write() as session:
        assert save_group(session, group, now=3.0)
        assert not save_group(session, group, now=4.0)

    with kit.database.read() as session:
        assert load_group(session, "g-1") == group
        assert load_group(session, "g-2") is None


def test_damaged_log_probabilities_cost_only_themselves(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    more = [answer(kit, "x"), answer(kit, "y")]
    with kit.database.write() as session:
        append_answers(session, group_id, more, size=3)
        session.execute(update(AnswerRow).where(AnswerRow.index == 1).values(logprobs=b"\x00" * 7))

    group = kit.group(group_id)
    assert [one.logprobs for one in group.answers[1:]] == [(), (-0.5, -0.25)]
    assert [one.token_ids for one in group.answers[1:]] == [(7, 2), (7, 2)]


def test_a_claimed_group_is_nobody_elses_until_its_lease_ends(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))

    assert claim(kit, now=100.0) == [group_id]
    assert claim(kit, now=129.9) == []
    assert claim(kit, now=130.0) == [group_id]
    with kit.database.write() as session:
        release_group(session, group_id, until=140.0)
    assert claim(kit, now=139.0) == []
    assert claim(kit, now=140.0) == [group_id]
    with kit.database.write() as session:
        retry_sampling(session, group_id, until=150.0)
        assert sampling_attempts(session, group_id) == 1
    assert claim(kit, now=149.0) == []
    with kit.database.write() as session:
        mark_sampled(session, group_id)
        assert load_scored_group(session, group_id) is None  # it has no scores
        assert append_answers(session, group_id, [answer(kit, "b")], size=4) == 0
    assert claim(kit, now=140.0, status="sampled") == [group_id]  # a step ends the lease


@pytest.mark.both_stores
def test_claims_take_the_oldest_of_one_status_and_no_more_than_asked(kit: Kit) -> None:
    ids = kit.choose(*(kit.exchange(f"e{n}") for n in range(3)))
    with kit.database.write() as session:
        mark_sampled(session, ids[0])

    assert claim(kit, now=1.0, limit=1) == [ids[1]]
    assert claim(kit, now=1.0) == [ids[2]]
    assert claim(kit, now=1.0, status="sampled") == [ids[0]]


@pytest.mark.both_stores
def test_two_workers_that_claim_at_once_never_get_the_same_group(kit: Kit) -> None:
    ids = kit.choose(*(kit.exchange(f"e{n}") for n in range(20)))
    taken: list[list[str]] = [[], []]
    start = threading.Barrier(2)

    def work(mine: list[str]) -> None:
        start.wait()
        while found := claim(kit, now=1.0, limit=1):
            mine.extend(found)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(taken[0] + taken[1]) == sorted(ids)


def test_answers_are_added_behind_those_there_up_to_the_size(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    with kit.database.write() as session:
        assert append_answers(session, group_id, [answer(kit, "b"), answer(kit, "c")], size=4) == 2
        assert append_answers(session, group_id, [answer(kit, "d"), answer(kit, "e")], size=4) == 1

    group = kit.group(group_id)
    assert [a.index for a in group.answers] == [0, 1, 2, 3]
    assert [a.message for a in group.answers] == [kit.message(c) for c in ("served", "b", "c", "d")]


@pytest.mark.both_stores
def test_each_step_happens_once_and_is_counted_once(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    with kit.database.write() as session:
        assert mark_sampled(session, group_id)
        assert not mark_sampled(session, group_id)
        assert mark_scored(session, group_id, [0.5], ["fine"], "judge", "hash", 7.0)
        assert not mark_scored(session, group_id, [0.9], ["late"], "judge", "hash", 8.0)
        assert not set_aside(session, group_id, "too late")

    with kit.database.read() as session:
        scored = load_scored_group(session, group_id)
    assert scored is not None
    assert scored.scores == (0.5,)
    assert scored.explanations == ("fine",)
    assert (scored.judge_model, scored.rubric_hash) == ("judge", "hash")
    assert scored.group.exchange_id == "e1"
    assert kit.row(group_id).scored_at == 7.0
    assert kit.counts("sampling") == {"sampled": 1}
    assert kit.counts("judging") == {"scored": 1}


def test_setting_aside_counts_in_the_stage_that_the_group_was_in(kit: Kit) -> None:
    early, late = kit.choose(kit.exchange("e1"), kit.exchange("e2"))
    with kit.database.write() as session:
        mark_sampled(session, late)
        assert set_aside(session, early, "adapter_gone")
        assert set_aside(session, late, "bad_reply")

    assert kit.row(early).status == "set_aside"
    assert kit.row(early).reason == "adapter_gone"
    assert kit.counts("sampling") == {"sampled": 1, "adapter_gone": 1}
    assert kit.counts("judging") == {"bad_reply": 1}


def test_scores_must_be_one_per_answer(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    with kit.database.write() as session:
        mark_sampled(session, group_id)
        with pytest.raises(ValueError, match="1 answers, got 2 scores"):
            mark_scored(session, group_id, [0.5, 0.5], ["a", "b"], "judge", "hash", 7.0)


def test_how_far_the_passes_differ_is_stored_by_answer_and_by_group(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    apart = Disagreement(by_answer=(0.25, 0.5), flipped=1.0)
    with kit.database.write() as session:
        append_answers(session, group_id, [answer(kit, "b")], size=2)
        mark_sampled(session, group_id)
        scores = ([0.5, 0.5], ["a", "b"])
        assert mark_scored(session, group_id, *scores, "judge", "hash", 7.0, apart, passes=4)

    row = kit.row(group_id)
    assert (row.disagreement, row.flipped_pairs, row.passes) == (0.375, 1.0, 4)
    with kit.database.read() as session:
        scored = load_scored_group(session, group_id)
        assert scored is not None
        assert scored.judged_by == ("judge", "hash", 4)
        stored = select(AnswerRow.disagreement).order_by(AnswerRow.index)
        assert session.scalars(stored).all() == [0.25, 0.5]


@pytest.mark.both_stores
def test_pending_groups_and_groups_by_session_are_counted(kit: Kit) -> None:
    ids = kit.choose(
        kit.exchange("e1", session_key="m:s"),
        kit.exchange("e2", session_key="m:s"),
        kit.exchange("e3", session_key="m:t"),
    )
    with kit.database.write() as session:
        mark_sampled(session, ids[0])
        set_aside(session, ids[1], "why")

        assert count_pending(session, {"base"}) == 2
        ids_of_sessions = ["m:s", "m:t", "m:u"]
        assert count_by_session(session, ids_of_sessions, since=0.0) == {"m:s": 2, "m:t": 1}
        assert count_by_session(session, ids_of_sessions, since=1e12) == {}


def test_scored_groups_are_pending_while_their_adapter_serves(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    with kit.database.write() as session:
        mark_sampled(session, group_id)
        mark_scored(session, group_id, (0.5,), ("fair",), "judge", "rubric", 1.0)

        assert count_pending(session, {"base"}) == 1
        assert count_pending(session, {"m--v1-0a0b0c0d0e0f"}) == 0
