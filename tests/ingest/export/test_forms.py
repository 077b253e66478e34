"""The forms of an export: our own, TRL's, ART's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice as ChatChoice

from ingest.export import art_group, exchange_object, preference, prompt_completion
from ingest.feedback.store import Annotations, FeedbackEntry, SignalEntry
from ingest.records import Answer, Group, Rewarded, ScoredGroup
from ingest.sessions.messages import Place
from ingest.store.exchanges import StoredExchange
from support.ingest_kit import make_choice, make_exchange, message

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
READ_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]


def stored(**changes: Any) -> StoredExchange:
    request = {"model": "m", "messages": MESSAGES, "tools": TOOLS}
    place = Place(
        exchange_id="e1", session="s1", parent="e0", turn=3, branch=1, segment=2, how="answered"
    )
    return StoredExchange(
        exchange=make_exchange("e1", **{"request": request, **changes}),
        held_out=False,
        selection="chosen",
        place=place,
        stored_at=5.0,
    )


def scored(*scores: float, request: bytes | None = None) -> ScoredGroup:
    answers = tuple(
        Answer(index=i, origin="sampled", message=message(f"answer {i}"), finish_reason="stop")
        for i in range(len(scores))
    )
    body = request or json.dumps({"messages": MESSAGES, "tools": TOOLS}).encode()
    group = Group(
        group_id="g1",
        exchange_id="e1",
        session_key="k",
        session_id="s1",
        adapter="a1",
        request=body,
        prompt_token_ids=(1,),
        answers=answers,
    )
    return ScoredGroup(
        group=group,
        scores=scores,
        explanations=tuple("why" if i == 0 else "" for i in range(len(scores))),
        judge_model="j",
        rubric_hash="h",
    )


def test_an_exchange_is_written_with_its_place_and_decoded_bodies() -> None:
    found = json.loads(json.dumps(exchange_object(stored())))

    place = {name: found[name] for name in ("session", "parent", "turn", "branch", "segment")}
    assert place == {"session": "s1", "parent": "e0", "turn": 3, "branch": 1, "segment": 2}
    assert found["request"]["messages"] == MESSAGES
    assert found["answers"][0]["message"] == {"role": "assistant", "content": "served"}
    assert found["prompt_tokens"] == 4
    assert "token_ids" not in json.dumps(found)


def test_a_body_that_is_no_json_is_written_as_text() -> None:
    assert exchange_object(stored(request=b'{"a": \xff'))["request"] == '{"a": \ufffd'


def test_trl_rows_have_tools_and_arguments_as_objects() -> None:
    row = prompt_completion(stored())

    assert row is not None
    assert row["prompt"][1]["tool_calls"] == [READ_CALL]
    assert row["completion"] == [{"role": "assistant", "content": "served"}]
    assert row["tools"] == TOOLS
    assert MESSAGES[1]["tool_calls"] == [CALL]


def test_the_answer_that_the_agent_got_is_the_completion() -> None:
    choices = (make_choice("first"), make_choice("second", index=1))

    row = prompt_completion(stored(choices=choices, returned_index=1))

    assert row is not None
    assert row["completion"][0]["content"] == "second"


@pytest.mark.parametrize(
    "changes",
    [
        {"surface": "responses"},
        {"outcome": "cut"},
        {"status": 500},
        {"choices": ()},
        {"request": b"[]"},
        {"request": {"messages": ["no message"]}},
    ],
)
def test_an_exchange_without_a_whole_chat_is_no_trl_row(changes: dict[str, Any]) -> None:
    assert prompt_completion(stored(**changes)) is None


def test_the_best_and_the_worst_answer_are_a_preference() -> None:
    row = preference(scored(0.5, 0.9, 0.1))

    assert row is not None
    assert row["chosen"][0]["content"] == "answer 1"
    assert row["rejected"][0]["content"] == "answer 2"
    assert (row["score_chosen"], row["score_rejected"]) == (0.9, 0.1)


TOLD = Annotations(
    feedback=(
        FeedbackEntry(
            feedback_id="f1",
            kind="feedback",
            target_kind="exchange",
            target="e1",
            source="",
            received_at=1.0,
            score=0.5,
            done=None,
            success=None,
            reward=None,
            cost=None,
            label="",
            comment="",
        ),
    ),
    signals=(SignalEntry(kind="retry", exchange_id="e1", by_id="e2", at=2.0, evidence={}),),
)


def test_groups_carry_what_was_told_of_the_served_answer() -> None:
    sampled = scored(0.25, 0.75)
    first, second = sampled.group.answers
    served = replace(
        sampled, group=replace(sampled.group, answers=(replace(first, origin="served"), second))
    )

    row, group = preference(served, TOLD), art_group(served, TOLD)

    assert row is not None
    assert (row["feedback_score"], row["signals"]) == (0.5, ["retry"])
    assert group is not None
    metadata = [one["metadata"] for one in group["trajectories"]]
    assert (metadata[0]["feedback_score"], metadata[0]["signals"]) == (0.5, "retry")
    assert "success" not in metadata[0]
    assert "feedback_score" not in metadata[1]


def test_a_tie_is_no_preference() -> None:
    assert preference(scored(0.5, 0.5)) is None


def test_each_answer_is_a_trajectory_of_art() -> None:
    group = art_group(scored(0.25, 0.75))

    assert group is not None
    first, second = group["trajectories"]
    assert [first["reward"], second["reward"]] == [0.25, 0.75]
    assert first["messages_and_choices"][:3] == MESSAGES
    choice = ChatChoice.model_validate(first["messages_and_choices"][3], strict=True)
    assert choice.message.content == "answer 0"
    assert (first["logs"], second["logs"]) == (["why"], [])
    assert first["tools"] == TOOLS


def test_a_group_without_messages_is_left_out() -> None:
    assert art_group(scored(0.1, 0.2, request=b'{"prompt": "x"}')) is None
    assert preference(scored(0.1, 0.2, request=b'{"prompt": "x"}')) is None


def test_a_reward_of_verifiers_is_what_trl_and_art_are_given() -> None:
    plain = scored(0.9, 0.1)
    rewarded = Rewarded(rewards=(0.3, 0.7), independent=(0.0, 1.0))

    made = replace(plain, rewarded=rewarded)
    group, row = art_group(made), preference(made)

    assert group is not None
    assert row is not None
    first = group["trajectories"][0]
    assert first["reward"] == 0.3
    assert first["metrics"] == {"ruler_score": 0.9, "independent_reward": 0.0}
    assert row["chosen"][0]["content"] == "answer 1"
    assert (row["score_chosen"], row["score_rejected"]) == (0.7, 0.3)
    unchanged = art_group(plain)
    assert unchanged is not None
    assert unchanged["trajectories"][0]["metrics"] == {}
