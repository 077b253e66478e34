"""RULER over its edge: passes, the one retry, merged answers, and what is told of each call."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ingest.errors import JudgeRefusalError, JudgeReplyError, JudgeUnavailableError
from ingest.ruler import ruler
from ingest.ruler.prompt import build_prompt
from ingest.ruler.ruler import JudgeCall, measure_disagreement, merge_identical, score_answers

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


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


async def test_scores_follow_the_answers_whatever_the_order_shown(judge_kit: JudgeKit) -> None:
    orders = set()
    for seed in range(12):
        judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
        judgement = await score(judge, said("fair", "bad", "good"), seed=seed)
        assert judgement.scores == (0.5, 0.1, 0.9)
        shown = judge_kit.shown_answers(judge.conversations[0]).values()
        orders.add(tuple(answer["content"] for answer in shown))
    assert len(orders) >= 4  # of the six there are


async def test_the_second_pass_is_the_first_in_reverse_and_the_third_is_new(
    judge_kit: JudgeKit,
) -> None:
    worth = {str(number): 0.1 * number for number in range(8)}
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(worth))
    await score(judge, said(*worth), passes=3, seed=1)
    first, second, third = (
        [answer["content"] for answer in judge_kit.shown_answers(talk).values()]
        for talk in judge.conversations
    )
    assert second == first[::-1]
    assert third not in (first, second)
    assert sorted(third) == sorted(first)


async def test_two_passes_cancel_what_the_judge_gives_to_a_position(judge_kit: JudgeKit) -> None:
    # +0.2 to the first shown, +0.1 to the second, none to the third.
    def biased(shown: Any) -> str:
        bonus = (0.2, 0.1, 0.0)
        return judge_kit.scores_reply(
            {
                name: round(0.5 * WORTH[answer["content"]] + bonus[place], 6)
                for place, (name, answer) in enumerate(shown.items())
            }
        )

    judgement = await score(judge_kit.FakeJudge(biased), said("good", "fair", "bad"), passes=2)
    # Forward and backward bonuses of each place add up to 0.2, so each mean is +0.1.
    assert judgement.scores == pytest.approx((0.55, 0.35, 0.15))


async def test_the_score_is_the_mean_and_the_explanations_stand_on_a_line_each(
    judge_kit: JudgeKit,
) -> None:
    judge = judge_kit.FakeJudge(
        judge_kit.score_by_content({"a": 0.2, "b": 0.4}),
        judge_kit.score_by_content({"a": 0.6, "b": 0.5}),
    )
    judgement = await score(judge, said("a", "b"), passes=2)
    assert judgement.scores == pytest.approx((0.4, 0.45))
    assert [len(words.split("\n")) for words in judgement.explanations] == [2, 2]


async def test_the_recorded_seed_rebuilds_the_prompt(judge_kit: JudgeKit) -> None:
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
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


async def test_identical_answers_are_shown_once_and_share_the_score(judge_kit: JudgeKit) -> None:
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
    judgement = await score(judge, said("good", "bad", "good", "good"))
    assert len(judge_kit.shown_answers(judge.conversations[0])) == 2
    assert judgement.scores == (0.9, 0.1, 0.9, 0.9)
    assert judgement.explanations[0] == judgement.explanations[2] == judgement.explanations[3]


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


def test_no_content_and_empty_content_are_identical() -> None:
    # A whole reply holds null where a stream holds "".
    streamed = {**calling("{}"), "content": ""}
    assert merge_identical([calling("{}"), streamed])[1] == [0, 0]


async def test_two_passes_tell_how_far_they_differ(judge_kit: JudgeKit) -> None:
    judge = judge_kit.FakeJudge(
        judge_kit.score_by_content({"a": 0.75, "b": 0.5, "c": 0.0}),
        judge_kit.score_by_content({"a": 0.25, "b": 0.5, "c": 0.0}),
    )
    judgement = await score(judge, said("a", "b", "c", "a"), passes=2)
    found = judgement.disagreement
    assert found.by_answer == (0.5, 0.0, 0.0, 0.5)
    assert found.mean == 0.25
    assert found.flipped == 1 / 3  # a and b, of the three pairs


def test_the_disagreement_of_three_passes_is_the_mean_over_their_pairs() -> None:
    # |differences| of the first answer: 0.25, 0.5, 0.25; of the second: 0.25, 0, 0.25.
    found = measure_disagreement([(1.0, 0.75), (0.75, 1.0), (0.5, 0.75)], [0, 1])
    assert found is not None
    assert found.by_answer == (1 / 3, 0.5 / 3)
    # First against second pass: flipped; second against third: not; first against third: flipped.
    assert found.flipped == 2 / 3


def test_a_tie_is_no_flip_and_one_pass_tells_nothing() -> None:
    found = measure_disagreement([(0.5, 0.5), (0.25, 0.75)], [0, 1])
    assert found is not None
    assert found.flipped == 0.0
    assert measure_disagreement([(0.5, 0.5)], [0, 1]) is None


async def test_a_prompt_is_not_written_on_the_event_loop(
    judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def build(**arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return build_prompt(**arguments)

    monkeypatch.setattr(ruler, "build_prompt", build)
    await score(judge_kit.FakeJudge(judge_kit.score_by_content(WORTH)), said("good", "bad"))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_judge_whose_reply_was_cut_is_told_so(judge_kit: JudgeKit) -> None:
    class Wordy(judge_kit.FakeJudge):  # type: ignore[misc, name-defined]
        async def complete(self, messages: Any, schema: Any) -> Any:
            reply = await super().complete(messages, schema)
            return replace(reply, cut=len(self.conversations) == 1)

    judge = Wordy('{"scores": [{"id', judge_kit.score_by_content(WORTH))
    judgement = await score(judge, said("good", "bad"))
    assert judgement.scores == (0.9, 0.1)
    assert "cut at the limit of tokens" in judge.conversations[1][-1]["content"]
    assert "cut at the limit of tokens" in judgement.calls[0].error


async def test_a_bad_reply_is_answered_once_with_what_is_wrong(judge_kit: JudgeKit) -> None:
    judge = judge_kit.FakeJudge("I like the second.", judge_kit.score_by_content(WORTH))
    judgement = await score(judge, said("good", "bad"))
    assert judgement.scores == (0.9, 0.1)
    first, second = judge.conversations
    assert second[: len(first)] == first
    assert second[2] == {"role": "assistant", "content": "I like the second."}
    assert 'no JSON object with a "scores" list' in second[3]["content"]
    assert [call.ok for call in judgement.calls] == [False, True]
    assert judgement.calls[0].reply.text == "I like the second."
    assert [call.attempt for call in judgement.calls] == [0, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda ids: "no", "no JSON object"),
        (lambda ids: {ids[0]: 7, ids[1]: 0.5}, "is 7, not from 0 to 1"),
    ],
)
async def test_a_second_bad_reply_refuses_the_group(
    judge_kit: JudgeKit, make: Any, words: str
) -> None:
    def rubbish(shown: Any) -> str:
        made = make(list(shown))
        return made if isinstance(made, str) else judge_kit.scores_reply(made)

    judge = judge_kit.FakeJudge(rubbish)
    heard: list[JudgeCall] = []
    with pytest.raises(JudgeReplyError, match=words):
        await score(judge, said("good", "bad"), passes=2, on_call=heard.append)
    assert len(judge.conversations) == 2  # not a third time, and no second pass
    assert words in judge.conversations[1][-1]["content"]
    assert [call.ok for call in heard] == [False, False]


async def test_a_long_bad_reply_is_shown_back_in_part(judge_kit: JudgeKit) -> None:
    judge = judge_kit.FakeJudge("x" * 10_000, judge_kit.score_by_content(WORTH))
    await score(judge, said("good", "bad"))
    assert judge.conversations[1][2]["content"] == "x" * ruler.SHOWN_BACK_CHARACTERS


@pytest.mark.parametrize("error", [JudgeUnavailableError("away"), JudgeRefusalError("too long")])
async def test_a_judge_that_does_not_answer_is_not_asked_again(
    judge_kit: JudgeKit, error: Exception
) -> None:
    judge = judge_kit.FakeJudge(error)
    with pytest.raises(type(error)):
        await score(judge, said("good", "bad"))
    assert len(judge.conversations) == 1


async def test_calls_before_an_outage_are_told(judge_kit: JudgeKit) -> None:
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH), JudgeUnavailableError("x"))
    heard: list[JudgeCall] = []
    with pytest.raises(JudgeUnavailableError):
        await score(judge, said("good", "bad"), passes=2, on_call=heard.append)
    assert [call.ok for call in heard] == [True]


async def test_the_judge_is_given_the_schema_of_the_prompt(judge_kit: JudgeKit) -> None:
    judge = judge_kit.FakeJudge(judge_kit.score_by_content(WORTH))
    await score(judge, said("good", "bad"))
    entry = judge.schemas[0]["properties"]["scores"]["items"]
    assert entry["properties"]["id"]["enum"] == list(
        judge_kit.shown_answers(judge.conversations[0])
    )


async def test_each_pass_leaves_a_span_without_content(
    judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(ruler, "_tracer", provider.get_tracer("test"))
    good = judge_kit.score_by_content(WORTH)
    judge = judge_kit.FakeJudge(good, "rubbish", good)

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
