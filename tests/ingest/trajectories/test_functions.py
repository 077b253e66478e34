"""RULER's functions as a program without a sidecar uses them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest

from ingest import (
    Trajectory,
    TrajectoryGroup,
    ruler_score_group,
    ruler_score_group_sync,
    ruler_scores,
    ruler_scores_sync,
)
from ingest.errors import JudgeReplyError, JudgeUnavailableError
from ingest.trajectories import scoring
from ingest.trajectories.records import TrajectoriesError
from support.fake_judge import FakeJudge
from support.trajectory_judge import RankingJudge, ranked
from tests.ingest.conftest import JudgeKit, ScriptedServer

ROOT = Path(__file__).resolve().parents[3]
WORTH = {"best": 0.9, "good": 0.7, "fair": 0.5, "bad": 0.1}
FOUR = ("fair", "bad", "best", "good")
ASK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]


def said(*texts: str) -> list[list[dict[str, Any]]]:
    return [[*ASK, {"role": "assistant", "content": text}] for text in texts]


def serve(kit: JudgeKit, worth: Callable[[str], float] = WORTH.__getitem__) -> ScriptedServer:
    return kit.serve(lambda body: (200, kit.completion(ranked(body["messages"], worth))))


def group_of(lists: list[list[dict[str, Any]]], **fields: Any) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=[Trajectory(messages=one, **fields) for one in lists])


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    scoring._warn_of.cache_clear()


async def test_scores_come_in_the_order_given_with_explanations() -> None:
    found = await ruler_scores(said(*FOUR), RankingJudge(WORTH))

    assert [one.score for one in found] == [0.5, 0.1, 0.9, 0.7]
    assert all(one.judged and len(one.explanation.split("\n")) == 2 for one in found)


async def test_a_group_keeps_all_that_it_had_and_gains_scores() -> None:
    wrong = ValueError("a rollout that failed")
    lists = said(*FOUR)
    group = TrajectoryGroup(
        trajectories=[
            Trajectory(
                messages=messages,
                reward=number / 4 if number else None,
                metrics={"turns": 1.0},
                metadata={"seed": number},
                logs=["made"],
                initial_policy_version=3,
                final_policy_version=4,
            )
            for number, messages in enumerate(lists)
        ],
        exceptions=[wrong],
        metrics={"seconds": 2.0},
        metadata={"scenario_id": "s-1"},
        logs=["gathered"],
    )

    scored = await ruler_score_group(group, RankingJudge(WORTH), passes=1)

    assert (scored.exceptions, scored.metrics) == ([wrong], {"seconds": 2.0})
    assert (scored.metadata, scored.logs) == ({"scenario_id": "s-1"}, ["gathered"])
    assert [one.reward for one in scored.trajectories] == [0.5, 0.1, 0.9, 0.7]
    assert [dict(one.metrics) for one in scored.trajectories] == [
        {"turns": 1.0, "ruler_score": 0.5},
        {"turns": 1.0, "independent_reward": 0.25, "ruler_score": 0.1},
        {"turns": 1.0, "independent_reward": 0.5, "ruler_score": 0.9},
        {"turns": 1.0, "independent_reward": 0.75, "ruler_score": 0.7},
    ]
    for number, one in enumerate(scored.trajectories):
        assert one.metadata == {"seed": number}
        assert (one.initial_policy_version, one.final_policy_version) == (3, 4)
        made, why = one.logs
        assert made == "made"
        assert why.startswith("RULER: why a")
        assert one.messages is lists[number]
    assert [one.reward for one in group.trajectories] == [None, 0.25, 0.5, 0.75]


async def test_the_tools_of_the_trajectories_are_shown_once() -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    judge = RankingJudge(WORTH)
    group = TrajectoryGroup(
        trajectories=[
            Trajectory(messages=one, tools=[tool("look"), tool(f"t{number}")])
            for number, one in enumerate(said(*FOUR))
        ]
    )
    await ruler_score_group(group, judge, passes=1)
    assert judge.prompts[0].count('"name": "look"') == 1
    assert all(f'"name": "t{number}"' in judge.prompts[0] for number in range(4))


async def test_identical_trajectories_cost_no_call(capsys: pytest.CaptureFixture[str]) -> None:
    judge = RankingJudge({})

    found = await ruler_scores(said(*["same"] * 4), judge, debug=True)

    assert judge.conversations == []
    assert [(one.score, one.judged) for one in found] == [(0.5, False)] * 4
    told = "all 4 trajectories are identical: the judge was not asked, and each has the score 0.5"
    assert found[0].explanation == told
    assert capsys.readouterr().err == f"{told}\n"


@pytest.mark.parametrize("size", [0, 1, 17])
async def test_groups_that_cannot_be_compared_are_refused(size: int) -> None:
    judge = RankingJudge({})
    with pytest.raises(TrajectoriesError, match=rf"^{size} trajectories .* 2 to 16"):
        await ruler_scores(said(*map(str, range(size))), judge)
    group = group_of([ASK] * size)
    with pytest.raises(TrajectoriesError, match=rf"^{size} trajectories"):
        await ruler_score_group(group, judge)
    assert judge.conversations == []


@pytest.mark.parametrize(
    ("size", "warned"), [(3, True), (4, False), (8, False), (9, True), (16, True)]
)
async def test_a_size_outside_4_to_8_is_warned_of_once(size: int, warned: bool) -> None:
    worth = {str(number): number / 20 for number in range(size)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = await ruler_scores(said(*worth), RankingJudge(worth), passes=1)
    assert [one.score for one in found] == list(worth.values())
    told = [str(one.message) for one in caught if "RULER scores" in str(one.message)]
    assert len(told) == (1 if warned else 0)
    assert all(f"{size} trajectories" in one and "4 to 8 are best" in one for one in told)


MIXED_CALL = {"function": {"name": "f", "arguments": {"a": 1, 1: 2}}}
"""JSON could hold it, but names of two types have no order."""


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (["text", *said("a", "b", "c")], "trajectory 0 is no list of messages"),
        ([*said("a", "b", "c"), []], "trajectory 3 has no messages"),
        ([*said("a", "b"), [{"content": "x"}], *said("c")], "trajectory 2, message 0 is no chat"),
        ([*said("a", "b", "c"), [*ASK, 7]], "trajectory 3, message 2 is no chat message"),
        (
            [*said("a"), [{"role": "assistant", "tool_calls": [MIXED_CALL]}], *said("b", "c")],
            "trajectory 1, message 0 cannot be written as JSON",
        ),
        ([*said("a", "b", "c"), [{"role": "assistant", "tool_calls": [1]}]], "tool_calls"),
        ([*said("a", "b", "c"), [{"role": "user", "content": {1, 2}}]], "written as JSON"),
    ],
)
async def test_what_is_no_chat_is_refused_with_its_place(lists: list[Any], words: str) -> None:
    with pytest.raises(TrajectoriesError, match=words):
        await ruler_scores(lists, RankingJudge({}))


async def test_objects_of_client_libraries_and_choices_are_taken() -> None:
    class Said:
        def __init__(self, content: str) -> None:
            self.content = content

        def model_dump(self, **_: Any) -> dict[str, Any]:
            return {"index": 0, "message": {"role": "assistant", "content": self.content}}

    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": "best"}}
    lists: list[Any] = [[*ASK, Said("bad")], [*ASK, choice], *said("good", "fair")]
    found = await ruler_scores(lists, RankingJudge(WORTH), passes=1)
    assert [one.score for one in found] == [0.1, 0.9, 0.7, 0.5]


@pytest.mark.parametrize(
    ("judge", "error"),
    [
        (FakeJudge("words"), JudgeReplyError),
        (FakeJudge(JudgeUnavailableError("down")), JudgeUnavailableError),
    ],
)
async def test_a_judge_that_fails_leaves_its_why(judge: FakeJudge, error: type[Exception]) -> None:
    earlier = RuntimeError("earlier")
    group = replace(group_of(said(*FOUR), reward=0.25), exceptions=[earlier])
    with pytest.raises(error):
        await ruler_score_group(group, judge)

    left = await ruler_score_group(group, judge, swallow_exceptions=True)

    assert [one.reward for one in left.trajectories] == [None] * 4
    assert [dict(one.metrics) for one in left.trajectories] == [{"independent_reward": 0.25}] * 4
    assert left.metrics == {"ruler_failed": 1.0}
    assert left.exceptions[0] is earlier
    assert isinstance(left.exceptions[1], error)
    assert left.logs[0].startswith(f"RULER gave no scores: {error.__name__}: ")


async def test_debug_says_why_there_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    class Mute(RankingJudge):
        async def complete(self, messages: Any, schema: Any) -> Any:
            found = await super().complete(messages, schema)
            key = "sk-" + 24 * "k"
            return replace(found, text=f"I like the second.\x1b[2J api_key={key} {2_000 * 'so '}")

    with pytest.raises(JudgeReplyError) as caught:
        await ruler_scores(said(*WORTH), Mute(WORTH), debug=True)

    told = capsys.readouterr().err
    assert "no verdict: the reply holds no JSON object" in told
    assert "; the judge wrote: I like the second.\\x1b[2J api_key=****" in told
    assert "(6058 characters)" in told
    assert "kkkk" not in told
    assert len(told) < 900
    assert "I like" not in str(caught.value)  # it is stored, and shown to the judge
    assert "the judge wrote: I like the second." in "".join(format_exception(caught.value))


async def test_debug_writes_the_verdict_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    bell = "bad\x1b]0;owned\x07"
    judge = RankingJudge({"best": 0.9, bell: 0.1, "good": 0.7, "fair": 0.5})
    await ruler_scores(said("fair", bell, "best", "good"), judge, debug=True)
    out, told = capsys.readouterr()
    first, *rows = told.splitlines()
    assert out == ""
    assert first == "judge ranking: 4 trajectories, 2 calls"
    assert [row.split()[:2] for row in rows if "[" in row] == [
        ["0.900", "[2]"],
        ["0.700", "[3]"],
        ["0.500", "[0]"],
        ["0.100", "[1]"],
    ]
    assert "\x1b" not in told
    assert rows[-1].strip() == "220 tokens, 1.0 s"


def test_without_await(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = said(*FOUR)
    found = ruler_scores_sync(lists, RankingJudge(WORTH))
    assert [one.score for one in found] == [0.5, 0.1, 0.9, 0.7]
    group = group_of(lists)
    scored = ruler_score_group_sync(group, RankingJudge(WORTH))
    assert [one.reward for one in scored.trajectories] == [0.5, 0.1, 0.9, 0.7]


async def test_the_twin_without_await_says_what_to_do_in_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="await the function without"):
        ruler_scores_sync(said(*FOUR), RankingJudge(WORTH))


async def test_a_named_judge_gets_the_parameters_and_no_context(judge_kit: JudgeKit) -> None:
    server = serve(judge_kit)
    params = {"api_base": server.url, "api_key": "sk-test-key-1", "temperature": 0.25, "timeout": 9}
    lists = [
        [ASK[0], {"role": "user", "content": "long " * 8_000}, *one[1:]] for one in said(*FOUR)
    ]

    found = await ruler_scores(
        lists,
        "openai/my-judge",
        rubric="Be swift.",
        extra_litellm_params=params,
        context_tokens=4_000,
        passes=1,
    )

    assert [one.score for one in found] == [0.5, 0.1, 0.9, 0.7]
    (asked,) = server.requests
    assert (asked["model"], asked["temperature"]) == ("my-judge", 0.25)
    assert "Grading standards:\nBe swift.\n" in asked["messages"][0]["content"]
    assert {"timeout", "context_tokens"}.isdisjoint(asked)
    assert len(str(asked["messages"])) < 16_000
    with pytest.raises(TrajectoriesError, match="an argument of its own"):
        await ruler_scores(lists, "openai/my-judge", extra_litellm_params={"context_tokens": 4_000})
    with pytest.raises(TrajectoriesError, match="by its LiteLLM name"):
        await ruler_scores(lists, RankingJudge(WORTH), context_tokens=4_000)


def test_a_size_is_warned_of_at_the_callers_line_and_warnings_stay_as_they_were() -> None:
    before, worth = warnings.showwarning, dict.fromkeys("abcde", 0.5)
    with warnings.catch_warnings(record=True) as caught:
        shown = warnings.showwarning
        warnings.simplefilter("always")
        ruler_scores_sync(said(*"abcde"), RankingJudge(worth))
        ruler_scores_sync(said(*"abc"), RankingJudge(worth))
        ruler_score_group_sync(group_of(said(*"ab")), RankingJudge(worth))
        assert warnings.showwarning is shown
    assert warnings.showwarning is before
    told = [one for one in caught if "RULER scores" in str(one.message)]
    assert [str(one.message)[:27] for one in told] == [
        "RULER scores 3 trajectories", "RULER scores 2 trajectories",
    ]  # fmt: skip
    assert [one.filename for one in told] == [__file__] * 2
    assert told[1].lineno == told[0].lineno + 1


def test_the_package_stays_light_and_names_only_what_it_has() -> None:
    code = (
        "import sys, ingest\n"
        "heavy = {'pydantic', 'litellm', 'sqlalchemy', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'ruler_scores' in dir(ingest)\n"
        "import ingest.ruler\n"
        "from ingest import ruler, ruler_scores, Trajectory\n"
        "assert ruler.__path__ and callable(ruler_scores)\n"
        "assert not {'litellm', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not hasattr(ingest, 'nothing')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("page", ["README.md", "docs/judge.md"])
def test_the_code_of_a_page_runs_as_it_is_written(
    judge_kit: JudgeKit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    page: str,
) -> None:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    (code,) = [block for block in blocks if "ruler_score" in block]
    server = serve(judge_kit, lambda text: len(text) / 100)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-key-1")

    exec(code, {})

    done = capsys.readouterr()
    rows = done.out.splitlines()
    assert (done.err, len(rows), server.requests[0]["model"]) == ("", 4, "gpt-4.1-mini")
    if page == "README.md":
        assert len([line for line in code.splitlines() if line.strip()]) <= 10
        for row in rows:
            score, said = re.findall(r"(\d\.\d\d)  (.*?)  \(why a[0-9a-f]{7}\)", row)[0]
            assert float(score) == round(len(said) / 100, 2)
        assert len(server.requests) == 2
    else:
        assert rows == [
            "0.25 1.0 No, 30 days is the limit.",
            "0.04 0.0 Yes.",
            "0.14 0.0 I do not know.",
            "0.3 1.0 No: returns end after 30 days.",
        ]
        assert 'extra_litellm_params={"api_base":' in text


@pytest.mark.parametrize(
    "options",
    [
        {"tools": "abc"},
        {"tools": [5]},
        {"tools": [{"type": {1}}]},
        {"rubric": " "},
        {"rubric": "polite \ud800"},
        {"passes": "2"},
        {"passes": 0},
        {"passes": 9},
        {"seed": 2**29},
        {"seed": -1},
        {"extra_litellm_params": {"temperature": 0}},
    ],
    ids=str,
)
async def test_an_option_of_the_wrong_kind_is_named(options: dict[str, Any]) -> None:
    judge = RankingJudge(WORTH)
    with pytest.raises(TrajectoriesError, match=next(iter(options)).removesuffix("s")):
        await ruler_scores(said(*WORTH), judge, **options)
    assert judge.conversations == []

    group = group_of(said(*WORTH))
    kept = await ruler_score_group(group, RankingJudge(WORTH), swallow_exceptions=True, **options)
    assert kept.metrics["ruler_failed"] == 1.0


async def test_what_is_no_list_of_trajectories_and_no_judge_is_refused() -> None:
    lists: Any
    for lists in (None, "abc", {"a": []}):
        with pytest.raises(TrajectoriesError, match="message_lists"):
            await ruler_scores(lists, RankingJudge(WORTH))
    for name in (" ", "two\nlines"):
        with pytest.raises(TrajectoriesError, match="judge"):
            await ruler_scores(said(*WORTH), name)
