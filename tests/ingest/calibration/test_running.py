"""Runs of judges that are scripted: what is kept of each pass, and what failures cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ingest.calibration.figures import (
    EQUAL_SCORES,
    IDENTICAL,
    NO_PREFERENCES,
    Candidate,
    KnownGroup,
    Run,
    Summary,
    left_out_lines,
    split_usable,
    summarise,
)
from ingest.calibration.running import (
    GIVE_UP_AFTER,
    LIMIT_TRIES,
    Plan,
    Sleep,
    judge_groups,
    read_groups,
)
from ingest.errors import (
    CalibrationFileError,
    JudgeBusyError,
    JudgeRefusalError,
    JudgeRejectedError,
)
from ingest.ruler.judge import Judge, JudgeReply
from support.fake_judge import Shown, scores_reply
from support.scripted_judges import ANSWER


def group(name: str = "g", *contents: str, task: str = "t") -> KnownGroup:
    contents = contents or ("a", "b", "c", "d")
    return KnownGroup(
        group_id=name,
        task=task,
        context=({"role": "user", "content": f"question of {name}"},),
        tools=(),
        candidates=tuple(
            Candidate(
                kind=f"k{text}", message={"role": "assistant", "content": text}, score=1.0 - n
            )
            for n, text in enumerate(contents)
        ),
        preferences=(),
    )


def plan(**fields: Any) -> Plan:
    values = {"passes": 2, "repeats": 1, "concurrency": 4, "seed": 0}
    return Plan(**{**values, **fields})


@dataclass
class Scripted:
    """Scores by a rule over what is shown; raises what `errors` has for a question first."""

    rule: Any
    errors: dict[str, list[Exception]] = field(default_factory=dict)
    cost_usd: float | None = 0.01
    model: str = "scripted"
    shown: list[list[str]] = field(default_factory=list)

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        prompt = messages[1]["content"]
        for name, errors in self.errors.items():
            if f"question of {name}" in prompt and errors:
                raise errors.pop(0)
        answers = {name: json.loads(body) for name, body in ANSWER.findall(prompt)}
        self.shown.append([answer["content"] for answer in answers.values()])
        return JudgeReply(
            text=self.rule(answers),
            prompt_tokens=100,
            completion_tokens=10,
            cost_usd=self.cost_usd,
            seconds=0.5,
        )


def by_position(shown: Shown) -> str:
    """0.9 for the first answer shown, 0.8 for the next, and so on."""
    return scores_reply({name: 0.9 - 0.1 * place for place, name in enumerate(shown)})


def by_content(shown: Shown) -> str:
    table = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.3}
    return scores_reply({name: table[answer["content"]] for name, answer in shown.items()})


async def no_wait(seconds: float) -> None:
    waits.append(seconds)


async def judge_all(
    judge: Judge, groups: Sequence[KnownGroup], how: Plan, sleep: Sleep = asyncio.sleep
) -> list[Run]:
    return await judge_groups(judge, groups, how, rubric="Be good.", sleep=sleep)


waits: list[float] = []


@pytest.fixture(autouse=True)
def _no_waits_yet() -> None:
    waits.clear()


async def test_a_position_is_the_one_at_which_the_judge_saw_the_answer() -> None:
    judge = Scripted(by_position)
    runs = await judge_all(judge, [group(str(n)) for n in range(20)], plan(repeats=2))

    for run in runs:
        for one in run.passes:
            expected = [pytest.approx(0.9 - 0.1 * place) for place in one.positions]
            assert list(one.scores) == expected


async def test_the_second_pass_shows_the_reverse_order_and_repeats_show_others() -> None:
    judge = Scripted(by_content)
    await judge_all(judge, [group()], plan(passes=4, repeats=2, concurrency=1))

    assert len(judge.shown) == 8
    for there, back in zip(judge.shown[::2], judge.shown[1::2], strict=True):
        assert there == back[::-1]
    assert len({tuple(order) for order in judge.shown[::2]}) > 1


async def test_judges_are_compared_on_the_same_orders() -> None:
    first, second = Scripted(by_content), Scripted(by_position, model="other")
    for judge in (first, second):
        await judge_all(judge, [group("x"), group("y")], plan(concurrency=1))

    assert first.shown == second.shown


async def test_identical_candidates_are_shown_once_and_share_score_and_position() -> None:
    judge = Scripted(by_content)
    (run,) = await judge_all(judge, [group("g", "a", "b", "a")], plan())

    assert run.scores == (0.9, 0.7, 0.9)
    assert (run.calls, run.tokens, run.cost_usd, run.seconds) == (2, 220, 0.02, 1.0)
    assert all(one.positions[0] == one.positions[2] for one in run.passes)
    assert [len(order) for order in judge.shown] == [2, 2]


async def test_a_bad_group_is_counted_by_its_reason_and_the_others_go_on() -> None:
    def rubbish_for_z(shown: Shown) -> str:
        texts = {answer["content"] for answer in shown.values()}
        return "I like them all" if "z" in texts else by_content(shown)

    judge = Scripted(
        rubbish_for_z,
        errors={
            "refused": [JudgeRefusalError("too long")],
            "rejected": [JudgeRejectedError("no")],
            "broken": [ZeroDivisionError("a defect")],
        },
    )
    groups = [group("fine"), group("refused"), group("rejected"), group("broken")]
    odd = group("odd")
    odd = replace(odd, candidates=(*odd.candidates, _odd_candidate()))
    groups.append(odd)
    runs = await judge_all(judge, [*groups, group("mad", "a", "z")], plan())

    assert {run.group.group_id: run.failure for run in runs} == {
        "fine": None,
        "refused": "judge_refused",
        "rejected": "judge_rejected",
        "broken": "judge_defect",
        "odd": "judge_defect",
        "mad": "judge_rubbish",
    }
    (mad,) = [run for run in runs if run.group.group_id == "mad"]
    assert (mad.calls, mad.unusable, mad.passes) == (2, 2, ())
    found = _sum_up(runs)
    assert (found.scored, found.runs, found.unusable_replies) == (1, 6, 2)
    assert ("judge_defect", 2, "ZeroDivisionError: a defect") in [
        (one.reason, one.count, one.example) for one in found.failures
    ]


async def test_a_rate_limit_is_waited_for_as_long_as_it_says() -> None:
    busy: list[Exception] = [JudgeBusyError("slow", retry_after_s=7.0), JudgeBusyError("slow")]
    judge = Scripted(by_content, errors={"g": busy})

    (run,) = await judge_all(judge, [group()], plan(), sleep=no_wait)

    assert run.failure is None
    assert waits == [7.0, 2.0]


async def test_a_rate_limit_that_stays_fails_the_run() -> None:
    busy: list[Exception] = [JudgeBusyError("slow") for _ in range(LIMIT_TRIES)]
    judge = Scripted(by_content, errors={"g": busy})

    (run,) = await judge_all(judge, [group()], plan(), sleep=no_wait)

    assert run.failure == "judge_busy"
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


async def test_a_judge_that_fails_on_every_group_is_asked_no_more() -> None:
    groups = [group(f"n{number}.") for number in range(40)]
    errors: dict[str, list[Exception]] = {
        one.group_id: [JudgeRejectedError("wrong key")] * 9 for one in groups
    }
    judge = Scripted(by_content, errors=errors)

    runs = await judge_all(judge, groups, plan(concurrency=2))

    reasons = [run.failure for run in runs]
    assert reasons.count("judge_rejected") in (GIVE_UP_AFTER, GIVE_UP_AFTER + 1)
    assert reasons.count("given_up") == 40 - reasons.count("judge_rejected")


async def test_no_more_groups_are_judged_at_once_than_the_plan_says() -> None:
    at_once: list[int] = [0]

    class Slow(Scripted):
        running = 0

        async def complete(
            self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
        ) -> JudgeReply:
            Slow.running += 1
            at_once.append(Slow.running)
            await asyncio.sleep(0.01)
            Slow.running -= 1
            return await super().complete(messages, schema)

    await judge_all(Slow(by_content), [group(str(n)) for n in range(9)], plan(concurrency=3))

    assert max(at_once) == 3


async def test_a_call_without_a_price_leaves_the_cost_unknown() -> None:
    runs = await judge_all(Scripted(by_content, cost_usd=None), [group()], plan())

    found = _sum_up(runs)
    assert (found.cost_usd, found.usd_per_group) == (None, None)
    assert (found.tokens_per_group, found.seconds_per_group) == (220, 1.0)


async def test_the_cost_of_a_group_is_that_of_a_run_with_its_retries() -> None:
    replies = iter(["no scores"])
    judge = Scripted(lambda shown: next(replies, None) or by_content(shown))

    found = _sum_up(await judge_all(judge, [group("x"), group("y")], plan(concurrency=1)))

    # Five calls at 0.01: two passes of each group, and one retry.
    assert found.cost_usd == pytest.approx(0.05)
    assert found.usd_per_group == pytest.approx(0.025)
    assert (found.scored, found.unusable_replies) == (2, 1)


async def test_a_group_of_preferences_counts_in_pairs_and_not_in_rank_agreement() -> None:
    unknown = [replace(one, score=None) for one in group().candidates]
    preferred = replace(group("p"), candidates=tuple(unknown), preferences=((0, 1), (3, 2)))

    found = _sum_up(await judge_all(Scripted(by_content), [preferred], plan()))

    assert found.tau is None
    assert found.pairs_right is not None
    assert found.pairs_right.value == 0.5  # of (a, b) and (d, c) it has the first right


async def test_shares_are_told_by_fault_and_by_task() -> None:
    def wrong_about_d(shown: Shown) -> str:
        table = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.8}
        return scores_reply({name: table[answer["content"]] for name, answer in shown.items()})

    groups = [group("x", task="easy"), group("y", "a", "d", task="hard")]
    found = _sum_up(await judge_all(Scripted(wrong_about_d), groups, plan()))

    # Of x: (b,d) and (c,d) are wrong, four of six are right. Of y: the one pair is right.
    assert found.pairs_right is not None
    assert found.pairs_right.value == pytest.approx(5 / 7)
    assert {name: one.value for name, one in found.by_task.items()} == {
        "easy": pytest.approx(4 / 6),
        "hard": 1.0,
    }
    assert {name: one.value for name, one in found.by_kind.items()} == {
        "kb": 1.0,
        "kc": 1.0,
        "kd": pytest.approx(2 / 4),
    }
    # Concordance of x: 4 - 2 of 6. Of y: 1.
    assert found.tau is not None
    assert found.tau.value == pytest.approx((2 / 6 + 1) / 2)


def _odd_candidate() -> Candidate:
    """A message that no model server would send."""
    return Candidate(kind="odd", message={"role": "assistant", "tool_calls": [5]}, score=0.0)


def _sum_up(runs: list[Run]) -> Summary:
    return summarise(runs, judge="j", rubric="r", rubric_hash="h", seed=0)


# Files of known scores and preferences, and what is said of a bad one.

MESSAGES = [{"role": "user", "content": "How long?"}]


def candidate(content: str, **fields: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content}, **fields}


def line(**fields: Any) -> str:
    made: dict[str, Any] = {
        "messages": MESSAGES,
        "candidates": [candidate("30 days", score=1), candidate("90 days", score=0.5)],
    }
    return json.dumps({k: v for k, v in {**made, **fields}.items() if v is not ...})


def test_scores_of_any_scale_give_the_pairs_of_known_order() -> None:
    candidates = [candidate(str(score), score=score) for score in (3, 5, 3)]

    (group,) = read_groups(line(candidates=candidates), "f")

    assert group.scores == (3.0, 5.0, 3.0)
    assert group.pairs == ((1, 0), (1, 2))


def test_preferences_stand_where_scores_are_not_known() -> None:
    candidates = [candidate("a"), candidate("b", kind="rude"), candidate("c")]

    (group,) = read_groups(line(candidates=candidates, preferences=[[0, 1]]), "f")

    assert group.scores is None
    assert group.pairs == ((0, 1),)
    assert group.candidates[1].kind == "rude"


def test_a_group_without_an_id_is_called_by_its_line() -> None:
    text = f"\n{line()}\n\n{line(id='named')}\n"

    assert [group.group_id for group in read_groups(text, "f")] == ["2", "named"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "the line: [1] is not an object"),
        (line(messages=...), "messages: null is not a list"),
        (line(messages=[]), "messages: is empty"),
        (line(candidates=[candidate("a", score=1)]), "candidates: 1 of them"),
        (line(id=7), "id: 7 is not a text"),
        (line(answers=[]), "answers: no such field; known: candidates, id"),
        (line(preferences=[[0, 1]]), "preferences: are there beside scores"),
        (
            line(candidates=[candidate("a", score=1), candidate("b")]),
            "score: 1 of 2 candidates have one",
        ),
        (
            line(candidates=[candidate("a"), candidate("b")], preferences=[[0, 2]]),
            "preferences: [0, 2] is not [index of the better, index of the worse], each from 0",
        ),
        (
            line(candidates=[candidate("a"), candidate("b")], preferences=[[1, 1]]),
            "preferences: [1, 1]",
        ),
        (
            line(candidates=[candidate("a", score="high"), candidate("b", score=1)]),
            'candidates[0].score: "high" is not a finite number',
        ),
        (
            line(candidates=[candidate("a", score=1), candidate("b", score=True)]),
            "candidates[1].score: true",
        ),
        (
            line(candidates=[candidate("a", score=1), candidate("b", score=float("nan"))]),
            "candidates[1].score: NaN",
        ),
        (
            line(candidates=[candidate("a", score=1), {"message": "b", "score": 0}]),
            'candidates[1].message: "b" is not an object',
        ),
    ],
)
def test_an_error_names_the_file_the_line_and_the_field(bad: str, said: str) -> None:
    with pytest.raises(CalibrationFileError) as caught:
        read_groups(f"{line(id='good')}\n{bad}\n", "rated.jsonl")

    assert str(caught.value).startswith(f"rated.jsonl line 2: {said}")
    assert "\n" not in str(caught.value)


def test_two_groups_of_one_id_are_refused() -> None:
    with pytest.raises(CalibrationFileError, match='line 2: id "x" is there twice'):
        read_groups(f"{line(id='x')}\n{line(id='x')}", "f")


def test_a_file_without_groups_is_refused() -> None:
    with pytest.raises(CalibrationFileError, match="f: holds no group"):
        read_groups("\n \n", "f")


def test_groups_without_a_known_order_or_a_difference_are_left_out_by_reason() -> None:
    short, long = candidate("30 days"), candidate("90 days")
    text = "\n".join(
        [
            line(id="good"),
            line(id="even", candidates=[{**one, "score": 0.5} for one in (short, long)]),
            line(id="same", candidates=[{**short, "score": n} for n in (1.0, 0.0)]),
            line(id="none", candidates=[short, long], preferences=[]),
            line(id="liked", candidates=[short, long], preferences=[[0, 1]]),
        ]
    )

    usable, left_out = split_usable(read_groups(text, "f"))

    assert [group.group_id for group in usable] == ["good", "liked"]
    assert left_out == {EQUAL_SCORES: ["even"], IDENTICAL: ["same"], NO_PREFERENCES: ["none"]}


def test_a_reason_is_said_with_its_number_and_some_ids() -> None:
    assert list(left_out_lines({IDENTICAL: list("abcdefg")})) == [
        f"7 left out (a, b, c, d, e, ...): {IDENTICAL}"
    ]
