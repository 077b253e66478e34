"""The figures of the learning benchmark, by cases worked by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import play as night
from benchmarks.learning.instructions import instructions
from benchmarks.learning.kept import Kept
from benchmarks.learning.play import (
    Exam,
    Kind,
    Plan,
    Played,
    measured_noise,
    play,
    play_ages,
    scored_group,
)
from benchmarks.learning.run import (
    KINDS,
    _targets,
    _targets_of_ages,
    gains,
    interval_over_runs,
    row,
    row_of_all,
)
from benchmarks.learning.tasks import Prompt, support
from benchmarks.learning.tools import json_schema, worth
from demo.stack import MODEL
from ingest.vllm.sampler import SampledAnswer
from learner.runs.selection import select_groups
from sidecar.settings import Learner

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


@pytest.mark.parametrize("task", [support(), instructions()], ids=lambda task: task.name)
def test_the_exam_shares_no_prompt_with_training(task: Any) -> None:
    told = [json.dumps(prompt.chat) for prompt in task.exam]

    assert not {json.dumps(prompt.chat) for prompt in task.train} & set(told)


def test_gains_are_paired_by_prompt() -> None:
    runs = [run(exam(0.0, 0.5), exam(0.5, 0.5)), run(exam(0.5, 0.5), exam(0.5, 1.0))]

    assert [gains(one) for one in runs] == [[0.5, 0.0], [0.0, 0.5]]
    assert row(runs[0])["gain"] == 0.25
    assert row_of_all(runs) == {
        "task": "t", "kind": "real", "seed": "all", "gain": 0.25, "low": 0.25, "high": 0.25,
    }  # fmt: skip


def test_the_interval_of_several_runs_knows_how_few_seeds_there_are() -> None:
    # Seeds alone differ: variance of their means 0.01, standard error 0.1 / sqrt(3), t(2) = 4.303.
    mean, low, high = interval_over_runs([[0.1] * 8, [0.2] * 8, [0.3] * 8])

    assert (mean, low, high) == pytest.approx((0.2, 0.2 - 0.24841, 0.2 + 0.24841), abs=1e-5)

    # Prompts alone differ: standard error 0.1 / sqrt(3) too, t(2) from three prompts.
    assert interval_over_runs([[0.1, 0.2, 0.3]] * 5) == pytest.approx((mean, low, high), abs=1e-9)


def test_each_seed_must_gain_and_more_with_all_groups_than_with_a_few() -> None:
    def real(seed: int, gain: float, kind: Kind = "real") -> Played:
        before = [0.1 * (at % 3) for at in range(30)]
        after = [one + gain + 0.01 * (at % 2) for at, one in enumerate(before)]
        return run(exam(*before), exam(*after), seed=seed, kind=kind)

    few = [real(seed, 0.05, "few") for seed in (1, 2, 3)]
    null = run(exam(*[0.5] * 30), exam(*[0.4, 0.6] * 15), kind="null", update_norm=0.01)
    runs = [*few, real(1, 0.26), real(2, 0.1), real(3, 0.27), real(1, 0.2, "noisy"), null]

    found = _targets("t", runs, {})
    weak = _targets("t", [*runs, real(4, -0.02), real(4, 0.0, "few")], {})

    assert [one.holds for one in found] == [True] * 6
    assert found[0].value == pytest.approx(0.1032, abs=0.002)
    assert "gain +0.215; for other seeds and prompts -0.02" in found[0].why
    assert found[1].value == pytest.approx(0.05)
    assert [one.holds for one in weak] == [False, False, True, True, False, True]
    assert [one.holds for one in _targets("t", [], {"t": "no data"})] == [False] * 5


LENGTHS = Prompt(
    id="p",
    chat={"messages": []},
    reward=lambda message: len(message["content"]) / 10,
    passes=lambda _: False,
)
ANSWERS = [
    SampledAnswer(
        message=json.dumps({"content": "x" * at}).encode(), finish_reason="stop",
        token_ids=(1, at), logprobs=(-1.0, -1.0), prompt_token_ids=(5,), model="base",
    )
    for at in range(8)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "least", "most"), [("null", 0, 3), ("noisy", 8, 16)])
def test_random_rewards_are_left_out_by_their_noise_and_noisy_ones_are_not(
    kind: Kind, least: int, most: int
) -> None:
    scored = [scored_group(LENGTHS, ANSWERS, kind, f"1/{at}") for at in range(16)]

    noise = measured_noise([LENGTHS] * 16, [ANSWERS] * 16, kind, 1)
    chosen = select_groups(scored, pack_tokens=2048, noise=noise)

    assert least <= len(chosen.groups) <= most


def test_old_groups_are_learned_from_beside_fresh_ones_of_the_same_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[int, str]] = []
    made: list[tuple[str, str, str, int]] = []

    def sample(_: str, prompts: Sequence[Prompt], *, adapter: str, **__: Any) -> list[Any]:
        sampled.append((len(prompts), adapter))
        return [ANSWERS] * len(prompts)

    def learn(_: str, task: Any, kind: str, seed: int, *rest: Any) -> Played:
        _, scored, _, before, _, parent = rest
        made.append((kind, parent.name, scored[0].group.adapter, parent.version))
        return run(before, exam(*(one + 0.25 for one in before.rewards)), kind=kind, task="t")

    monkeypatch.setattr(night, "vllm", lambda folder: nullcontext("url"))
    monkeypatch.setattr(night, "sample", sample)
    monkeypatch.setattr(night, "_run", learn)
    monkeypatch.setattr(night, "_exam", lambda *_: exam(0.0, 0.5))
    monkeypatch.setattr(night, "serve", lambda *_: None)
    monkeypatch.setattr(night, "folder_digest", lambda _: "")
    plan = Plan(groups=8, few=2, size=8, exam_answers=1, learner=Learner())

    kept = Kept(tmp_path / "night", {}, resume=True)
    found = play_ages(support(), 1, plan, kept)
    again = play_ages(support(), 1, plan, kept)

    first, second, third = (f"{MODEL}--fresh-{version}" for version in range(3))
    assert made == [
        ("fresh-0", "base", "base", 0),
        ("old-1", first, "base", 1),
        ("fresh-1", first, first, 1),
        ("old-2", second, "base", 2),
        ("fresh-2", second, second, 2),
        ("old-3", third, "base", 3),
        ("fresh-3", third, third, 3),
    ]
    assert sampled == [(2, adapter) for _, _, adapter, _ in made]
    assert again == found  # nothing is made twice
    assert [one.before.rewards[0] for one in found] == [0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    assert [one.holds for one in _targets_of_ages("t", found, {})] == [True] * 3
    assert [one.holds for one in _targets_of_ages("t", [], {})] == [False] * 3


def test_a_finished_run_is_kept_when_the_answers_of_its_night_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def learn(_: str, task: Any, kind: str, *rest: Any) -> Played:
        made.append(kind)
        return run(exam(0.0), exam(0.25), kind=kind)

    monkeypatch.setattr(night, "vllm", lambda folder: nullcontext("url"))
    monkeypatch.setattr(night, "sample", lambda _, prompts, **__: [ANSWERS] * len(prompts))
    monkeypatch.setattr(night, "_run", learn)
    monkeypatch.setattr(night, "_exam", lambda *_: exam(0.0))
    plan = Plan(groups=4, few=2, size=8, exam_answers=1, learner=Learner())
    runs = tmp_path / "runs"

    for kinds in (KINDS[:1], KINDS[:2], KINDS[:2]):
        answers = Kept(tmp_path / "night", {}, resume=False)
        played = play(support(), kinds, 1, plan, answers, Kept(runs, {}, resume=True))
        assert [one.kind for one in played] == list(kinds)

    assert made == list(KINDS[:2])
