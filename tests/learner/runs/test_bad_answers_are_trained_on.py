"""Bad answers go all the way: sampled, kept in the group, shown to the judge, trained on as bad.

A policy that never sees its failures scored low learns that they cost nothing.
"""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

import pytest

from ingest.records import Answer, Group, ScoredGroup
from ingest.reward_watch.traits import KINDS, traits_of
from ingest.ruler.prompt import read_material
from ingest.ruler.ruler import score_answers
from ingest.sampling.round import conclude
from ingest.vllm.sampler import SampledAnswer, read_reply
from learner.runs.selection import select_groups
from support.fake_judge import FakeJudge, Shown, scores_reply

GOOD = "Paris, since it is the seat of government."
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"required": ["q"]}}}]
PROMPT = [1, 9, 9, 4]


def call(name: str, arguments: str) -> list[dict[str, Any]]:
    return [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"content": ""}, "stop"),
    "empty, null": ({"content": None, "tool_calls": [], "reasoning": None}, "stop"),
    "only thought": ({"content": None, "reasoning": "Let me think."}, "stop"),
    "cut": ({"content": "Paris, since it is the"}, "length"),
    "cut and empty": ({"content": ""}, "length"),
    "repetition": ({"content": "and so on " * 200}, "length"),
    "refusal": ({"content": "I'm sorry, but I can't help with that."}, "stop"),
    "clarifying": ({"content": "Which capital do you mean?"}, "stop"),
    "unknown tool": ({"content": None, "tool_calls": call("gone", "{}")}, "tool_calls"),
    "no json": ({"content": None, "tool_calls": call("look", '{"q": ')}, "tool_calls"),
    "no object": ({"content": "", "tool_calls": call("look", "[[[")}, "tool_calls"),
    "against the schema": ({"content": None, "tool_calls": call("look", "{}")}, "tool_calls"),
    "nameless": ({"content": None, "tool_calls": call("", "")}, "tool_calls"),
    "call as text": ({"content": '<tool_call>{"name": "look", '}, "stop"),
    "no text at all": ({"content": "\u200b \u202e"}, "stop"),
}


def sampled(message: dict[str, Any], finish_reason: str) -> SampledAnswer:
    """What the sampler makes of vLLM's reply."""
    reply = {
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **message},
                "finish_reason": finish_reason,
                "token_ids": [7 + crc32(repr(message).encode()) % 1_000, 2],
                "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]},
            }
        ],
        "usage": {"completion_tokens": 2},
        "prompt_token_ids": PROMPT,
    }
    return read_reply(json.dumps(reply).encode(), asked="m")


def group_of(*messages: tuple[dict[str, Any], str]) -> Group:
    return Group(
        group_id="g",
        exchange_id="e",
        session_key="h:s",
        adapter="base",
        request=json.dumps(
            {"messages": [{"role": "user", "content": "The capital?"}], "tools": TOOLS}
        ).encode(),
        prompt_token_ids=tuple(PROMPT),
        answers=tuple(
            Answer(
                index=at,
                origin="served" if at == 0 else "sampled",
                message=one.message,
                finish_reason=one.finish_reason,
                token_ids=one.token_ids,
                logprobs=one.logprobs,
            )
            for at, one in enumerate(sampled(*message) for message in messages)
        ),
    )


def judge() -> FakeJudge:
    """Gives 0.9 to the good answer and 0.1 to any other."""

    def score(shown: Shown) -> str:
        return scores_reply({n: 0.9 if a["content"] == GOOD else 0.1 for n, a in shown.items()})

    return FakeJudge(score)


async def judged(group: Group) -> ScoredGroup:
    material = read_material(group)
    judgement = await score_answers(
        judge(),
        context=material.context,
        tools=material.tools,
        answers=material.answers,
        rubric="Be good.",
        passes=2,
        seed=1,
    )
    return ScoredGroup(
        group=group,
        scores=judgement.scores,
        explanations=judgement.explanations,
        judge_model="scripted",
        rubric_hash="r",
    )


@pytest.mark.parametrize("name", BAD)
async def test_each_kind_is_judged_and_pushed_down(name: str) -> None:
    good = ({"content": GOOD}, "stop")
    group = group_of(BAD[name], good)

    assert conclude(group.answers, size=2, rounds=0, misses=()).action == "sampled"
    scored = await judged(group)
    selection = select_groups([scored], pack_tokens=100)

    (trained,) = selection.groups
    assert selection.dropped == {}
    assert selection.masked_answers == {}
    assert trained.rows[0].trainable
    assert trained.rows[0].advantage == pytest.approx(-0.4)
    assert trained.rows[0].token_ids == group.answers[0].token_ids


def test_the_cases_cover_every_kind_that_the_watch_knows() -> None:
    found: set[str] = set()
    for message, finish_reason in BAD.values():
        traits = traits_of(
            sampled(message, finish_reason).message, finish_reason=finish_reason, tools=TOOLS
        )
        found |= {kind for kind in KINDS if getattr(traits, kind)}

    assert found == set(KINDS)
