"""RULER over its edge: passes, the one retry, merged answers, and what is told of each call."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ingest.errors import JudgeReplyError
from ingest.ruler import ruler
from ingest.ruler.prompt import build_prompt
from ingest.ruler.ruler import JudgeCall, measure_disagreement, merge_identical, score_answers
from support.fake_judge import FakeJudge, score_by_content, scores_reply, shown_answers

WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text} for text in texts]


async def score(judge: Any, answers: list[dict[str, Any]], **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "context": [{"role": "user", "content": "hello"}],
        "tools": [],
        "answers": answers,
        "rubric": "r",
        "passes": 1,
        "seed": 11,
    }
    return await score_answers(judge, **{**arguments, **changes})


async def test_the_second_pass_reverses_the_first_the_third_is_new() -> None:
    worth = {str(number): 0.1 * number for number in range(8)}
    judge = FakeJudge(score_by_content(worth))
    await score(judge, said(*worth), passes=3, seed=1)
    first, second, third = (
        [answer["content"] for answer in shown_answers(talk).values()]
        for talk in judge.conversations
    )
    assert second == first[::-1]
    assert third not in (first, second)
    assert sorted(third) == sorted(first)


async def test_two_passes_cancel_what_the_judge_gives_to_a_position() -> None:
    # +0.2 to the first shown, +0.1 to the second, none to the third.
    def biased(shown: Any) -> str:
        bonus = (0.2, 0.1, 0.0)
        return scores_reply(
            {
                name: round(0.5 * WORTH[answer["content"]] + bonus[place], 6)
                for place, (name, answer) in enumerate(shown.items())
            }
        )

    judgement = await score(FakeJudge(biased), said("good", "fair", "bad"), passes=2)
    # Forward and backward bonuses of each place add up to 0.2, so each mean is +0.1.
    assert judgement.scores == pytest.approx((0.55, 0.35, 0.15))


async def test_the_recorded_seed_rebuilds_the_prompt() -> None:
    judge = FakeJudge(score_by_content(WORTH))
    answers = said("bad", "good", "fair")
    judgement = await score(judge, answers, passes=4, seed=5)
    assert [call.order_seed for call in judgement.calls] == [10, 11, 12, 13]
    for call, talk in zip(judgement.calls, judge.conversations, strict=True):
        again = build_prompt(
            context=[{"role": "user", "content": "hello"}],
            tools=[],
            answers=answers,
            rubric="r",
            rng=random.Random(call.order_seed >> 1),
            reverse=call.order_seed % 2 == 1,
        )
        assert list(again.messages) == talk


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [true, null]}', '{"b":[true,null],"a":1}'),
        ('{"t": "\u00fc"}', '{ "t": "ü" }'),
        ("", ""),
        ("{not JSON", "{not JSON"),
    ],
)
def test_calls_whose_arguments_are_written_otherwise_are_identical(one: str, other: str) -> None:
    distinct, place_of = merge_identical([calling(one), calling(other)])
    assert place_of == [0, 0]
    assert distinct == [calling(one)]  # shown as it was written


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 2}', '{"a": 1, "a": 2}'),  # which of the two counts, the tool decides
        ('"x"', "x"),
        ("", "{}"),
    ],
)
def test_calls_whose_arguments_differ_are_not_identical(one: str, other: str) -> None:
    assert merge_identical([calling(one), calling(other)])[1] == [0, 1]


def calling(arguments: str) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"function": {"name": "t", "arguments": arguments}}]}


def test_the_disagreement_of_three_passes_is_the_mean_over_their_pairs() -> None:
    # |differences| of the first answer: 0.25, 0.5, 0.25; of the second: 0.25, 0, 0.25.
    found = measure_disagreement([(1.0, 0.75), (0.75, 1.0), (0.5, 0.75)], [0, 1, 0])
    assert found is not None
    assert found.by_answer == (1 / 3, 0.5 / 3, 1 / 3)
    # First against second pass: flipped; second against third: not; first against third: flipped.
    assert found.flipped == 2 / 3


def test_a_tie_is_no_flip_and_one_pass_tells_nothing() -> None:
    found = measure_disagreement([(0.5, 0.5), (0.25, 0.75)], [0, 1])
    assert found is not None
    assert found.flipped == 0.0
    assert measure_disagreement([(0.5, 0.5)], [0, 1]) is None


async def test_a_prompt_is_not_written_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def build(**arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return build_prompt(**arguments)

    monkeypatch.setattr(ruler, "build_prompt", build)
    await score(FakeJudge(score_by_content(WORTH)), said("good", "bad"))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_judge_whose_reply_was_cut_is_told_so() -> None:
    class Wordy(FakeJudge):
        async def complete(self, messages: Any, schema: Any) -> Any:
            reply = await super().complete(messages, schema)
            return replace(reply, cut=len(self.conversations) == 1)

    judge = Wordy('{"scores": [{"id', score_by_content(WORTH))
    judgement = await score(judge, said("good", "bad"))
    assert judgement.scores == (0.9, 0.1)
    assert "cut at the limit of tokens" in judge.conversations[1][-1]["content"]
    assert "cut at the limit of tokens" in judgement.calls[0].error


async def test_a_bad_reply_is_answered_once_with_what_is_wrong() -> None:
    judge = FakeJudge("I like the second.", score_by_content(WORTH))
    judgement = await score(judge, said("good", "bad"))
    assert judgement.scores == (0.9, 0.1)
    first, second = judge.conversations
    assert second[: len(first)] == first
    assert second[2] == {"role": "assistant", "content": "I like the second."}
    assert 'no JSON object with a "scores" list' in second[3]["content"]
    assert [call.ok for call in judgement.calls] == [False, True]
    assert judgement.calls[0].reply.text == "I like the second."
    assert [call.attempt for call in judgement.calls] == [0, 1]


async def test_a_second_bad_reply_refuses_the_group() -> None:
    judge = FakeJudge(lambda shown: scores_reply(dict.fromkeys(shown, 7)))
    heard: list[JudgeCall] = []
    with pytest.raises(JudgeReplyError, match="is 7, not from 0 to 1"):
        await score(judge, said("good", "bad"), passes=2, on_call=heard.append)
    assert len(judge.conversations) == 2  # not a third time, and no second pass
    assert "is 7, not from 0 to 1" in judge.conversations[1][-1]["content"]
    assert [call.ok for call in heard] == [False, False]


async def test_a_long_bad_reply_is_shown_back_in_part() -> None:
    judge = FakeJudge("x" * 10_000, score_by_content(WORTH))
    await score(judge, said("good", "bad"))
    assert judge.conversations[1][2]["content"] == "x" * ruler.SHOWN_BACK_CHARACTERS


async def test_each_pass_leaves_a_span_without_content(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(ruler, "_tracer", provider.get_tracer("test"))
    good = score_by_content(WORTH)
    judge = FakeJudge(good, "rubbish", good)

    await score(judge, said("good", "bad"), passes=2, subject="g-1")

    spans = [dict(span.attributes or {}) for span in exporter.get_finished_spans()]
    assert [span.name for span in exporter.get_finished_spans()] == ["judge", "judge"]
    shared = {"judge.model": "scripted", "judge.group_id": "g-1", "judge.ok": True}
    tokens = {"judge.prompt_tokens": 100, "judge.completion_tokens": 10}
    assert spans[0] == {**shared, **tokens, "judge.pass": 0, "judge.calls": 1}
    assert spans[1] == {**shared, "judge.pass": 1, "judge.calls": 2} | {
        "judge.prompt_tokens": 200,
        "judge.completion_tokens": 20,
    }
    assert "good" not in json.dumps(spans)
