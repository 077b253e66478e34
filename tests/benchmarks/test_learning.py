"""The figures of the learning benchmark, by cases worked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import instructions as obeyed
from benchmarks.learning.instructions import instructions
from benchmarks.learning.play import (
    Exam,
    Kind,
    Plan,
    Played,
    _noise,
    _scored,
    random_scores,
)
from benchmarks.learning.played import kept, write
from benchmarks.learning.run import gains, interval, row
from benchmarks.learning.tasks import Prompt, support
from benchmarks.learning.tools import json_schema, worth
from ingest.vllm.sampler import SampledAnswer
from learner.runs.selection import select_groups
from sidecar.settings import Learner

PLAN = Plan(rounds=1, groups=16, size=8, exam_answers=1, learner=Learner())
FUNCTION = json_schema(
    {
        "name": "area",
        "parameters": {
            "type": "dict",
            "properties": {"base": {"type": "integer"}, "unit": {"type": "string"}},
            "required": ["base"],
        },
    }
)
TRUTH = {"area": {"base": [10], "unit": ["units", ""]}}


def exam(*rewards: float) -> Exam:
    return Exam(rewards=rewards, passed=0.5, tokens=9.0)


def run(before: Exam, after: Exam, **changes: Any) -> Played:
    values: dict[str, Any] = {
        "task": "t", "kind": "real", "seed": 1, "groups": 3, "dropped": 1, "steps": 2,
        "update_norm": 0.5, "seconds": 60.0, **changes,
    }  # fmt: skip
    return Played(before=before, after=after, **values)


@pytest.mark.parametrize(
    ("call", "reward"),
    [
        ("I cannot.", 0.0),
        ("[1]", 0.0),
        ("{}", 0.2),
        ('{"name": "area"}', 0.2),
        ('<tool_call>{"name": "volume", "arguments": {}}</tool_call>', 0.4),
        ('{"name": "area", "arguments": {}}', 0.6),
        ('{"name": "area", "arguments": {"base": "10"}}', 0.6),
        ('{"name": "area", "arguments": {"base": 10, "height": 5}}', 0.6),
        ('{"name": "area", "arguments": {"base": 9}}', 0.8),
        ('{"name": "area", "arguments": {"base": 10}}', 1.0),
        ('<tool_call>{"name": "area", "arguments": {"base": 10, "unit": "units"}}', 1.0),
    ],
)
def test_a_call_is_worth_how_far_it_gets(call: str, reward: float) -> None:
    assert worth({"content": call}, FUNCTION, TRUTH) == reward


def test_a_call_that_vllm_has_parsed_is_worth_the_same() -> None:
    said = {"name": "area", "arguments": '{"base": 10}'}

    assert worth({"tool_calls": [{"function": said}]}, FUNCTION, TRUTH) == 1.0
    assert worth({"tool_calls": [{"function": {**said, "arguments": "{"}}]}, FUNCTION, TRUTH) == 0.2


def test_instructions_are_checked_by_code() -> None:
    assert obeyed.short("one " * 15) == 1.0
    assert obeyed.short("one " * 60) == 0.0
    assert obeyed.exclaims("Yes! ") == 1.0
    assert obeyed.lower("aB") == 0.5
    assert obeyed.one_sentence("A b. C d.") == 0.5
    assert obeyed.one_sentence("A b") == 0.0
    assert obeyed.keyword("Quiet, please", word="quiet") == 1.0
    assert obeyed.begins(" Well, yes") == 1.0


def test_too_short_an_answer_obeys_nothing() -> None:
    lower = next(one for one in instructions().train if "lower" in one.id and "Well" in one.id)

    assert lower.reward({"content": "well, it is red"}) == 1.0
    assert lower.reward({"content": "well"}) == 0.0
    assert lower.reward({"content": None}) == 0.0


@pytest.mark.parametrize("task", [support(), instructions()], ids=lambda task: task.name)
def test_the_exam_shares_no_prompt_with_training(task: Any) -> None:
    told = [json.dumps(prompt.chat) for prompt in task.exam]

    assert not {json.dumps(prompt.chat) for prompt in task.train} & set(told)


def test_gains_are_paired_by_prompt_and_averaged_over_runs() -> None:
    runs = [run(exam(0.0, 0.5), exam(0.5, 0.5)), run(exam(0.5, 0.5), exam(0.5, 1.0))]

    assert gains(runs) == [0.25, 0.25]
    assert interval(gains(runs)) == (0.25, 0.25, 0.25)
    assert row(runs[0])["gain"] == 0.25


def test_the_interval_covers_a_true_mean_of_nothing() -> None:
    mean, low, high = interval([-0.5, 0.5] * 16)

    assert mean == 0.0
    assert low < 0.0 < high


@pytest.mark.parametrize(("kind", "most"), [("null", 3), ("null, gate off", 16)])
def test_random_rewards_are_left_out_once_their_noise_is_measured(kind: Kind, most: int) -> None:
    prompt = Prompt(id="p", chat={"messages": []}, reward=lambda _: 0.0, passes=lambda _: False)
    answers = [
        SampledAnswer(
            message=b'{"content": "x"}', finish_reason="stop", token_ids=(1, at),
            logprobs=(-1.0, -1.0), prompt_token_ids=(5,), model="base",
        )
        for at in range(8)
    ]  # fmt: skip
    scored = [_scored(prompt, answers, "base", kind, f"1/1/{at}") for at in range(16)]

    chosen = select_groups(
        scored,
        min_spread=PLAN.learner.min_spread,
        pack_tokens=2048,
        noise=_noise(1, 1, PLAN) if kind == "null" else None,
    )

    assert len(chosen.groups) <= most
    assert (len(chosen.groups) == 16) == (kind == "null, gate off")
    assert random_scores(8, "1/1/0") == scored[0].scores


def test_a_finished_run_is_kept_for_the_same_options_only(tmp_path: Path) -> None:
    done = run(exam(0.25, 1 / 3), exam(0.5, 0.75), kind="null, gate off")
    options = {"rate": 1e-3, "rounds": 6}
    assert kept(tmp_path, options) is None

    write(done, tmp_path, options)

    assert kept(tmp_path, options) == done
    assert kept(tmp_path, options | {"rounds": 7}) is None
