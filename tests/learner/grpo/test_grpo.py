"""The optimiser steps on a tiny model: signs, masks, invariances, and what stops a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.errors import NonFiniteError, RunStoppedError
from learner.grpo.chance import deal
from learner.grpo.trainer import accelerator, run_steps
from learner.policy.adapter_io import ADAPTER, load_policy
from learner.policy.logprobs import Policy
from learner.records import Parent, Phase, Stage, StepMetrics, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import job_of, logprobs_of, make_group, make_row, on_policy as sampled

PROMPT = (1, 2, 3)
GOOD, BAD = (10, 11, 12), (20, 21)


OnPolicy = Callable[..., TrainingGroup]


@pytest.fixture
def on_policy(policy: Policy) -> OnPolicy:
    """on_policy({ids: advantage}): a group that the policy sampled."""

    def make(answers: dict[tuple[int, ...], float], **options: Any) -> TrainingGroup:
        rows = [make_row(ids, advantage) for ids, advantage in answers.items()]
        return sampled(policy, make_group(PROMPT, rows, **options))

    return make


class Told:
    """Keeps what a trainer tells."""

    def __init__(self) -> None:
        self.said: list[tuple[str, object]] = []

    def phase(self, name: Phase) -> None:
        self.said.append(("phase", name))

    def plan(self, stages: Sequence[Stage]) -> None:
        names = [(one.name, [(part.group_id, part.step) for part in one.parts]) for one in stages]
        self.said.append(("plan", names))

    def done(self, group_id: str) -> None:
        self.said.append(("done", group_id))

    def begin_steps(self, done: Sequence[StepMetrics]) -> None:
        self.said.append(("begin", [one.step for one in done]))

    def step(self, metrics: StepMetrics) -> None:
        self.said.append(("step", metrics))


def test_a_watch_is_told_of_each_pass_group_and_step(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    groups = [on_policy({GOOD: 0.5, BAD: -0.5}, group_id=name) for name in ("a", "b", "c")]
    told = Told()
    settings = learner_settings.model_copy(update={"groups_per_step": 2})
    job = replace(job_of(groups, settings), watch=told)

    outcome, _ = run_steps(policy, job)

    passes = [("a", 1), ("c", 1), ("b", 2)]
    assert told.said == [
        ("plan", [("checking", [("a", 0), ("b", 0), ("c", 0)]), ("training", passes)]),
        ("done", "a"),
        ("done", "b"),
        ("done", "c"),
        ("plan", [("training", passes)]),
        ("begin", []),
        ("done", "a"),
        ("done", "c"),
        ("step", outcome.metrics[0]),
        ("done", "b"),
        ("step", outcome.metrics[1]),
        ("phase", "measuring"),
    ]


def test_a_step_has_its_masked_answers_length_drift_and_memory(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    one = on_policy({GOOD: 0.5, BAD: -0.5})
    one = replace(
        one, rows=(*one.rows, make_row((30,) * 9, trainable=False)), scores=(1.0, 0.0, 0.5)
    )
    settings = learner_settings.model_copy(update={"groups_per_step": 1, "learning_rate": 0.01})

    first, second = run_steps(policy, job_of([one, replace(one, group_id="h")], settings))[
        0
    ].metrics

    assert (first.masked_answers, first.answers) == (1, 2)
    assert first.answer_tokens == 2.5  # answers of 3 and 2 tokens
    assert first.drift < 1e-5
    assert second.drift > 1e-3, "the first step moved the policy"
    assert second.peak_memory_bytes > 10_000_000


def test_a_step_says_what_it_left_out_by_reason(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    """Two answers came masked, one of them without a reason; the check leaves one more out, and a
    group; the other step has groups of its own, and knows of that group too."""
    foreign = (48, 48)  # outside of the vocabulary
    more = (make_row((30,), trainable=False), make_row((31,), trainable=False), make_row(foreign))
    one = on_policy({GOOD: 0.5, BAD: -0.5})
    one = replace(one, rows=(*one.rows, *more), scores=(1.0, 0.0, 0.5, 0.5, 0.5))
    sound = replace(on_policy({GOOD: 0.5, BAD: -0.5}), group_id="sound")
    bad = replace(sound, group_id="bad", prompt_token_ids=foreign)
    settings = learner_settings.model_copy(update={"groups_per_step": 1})
    job = replace(job_of([one, sound, bad], settings), masked={one.group_id: {2: "top_p"}})

    outcome, _ = run_steps(policy, job)

    of_groups = {"groups.token_out_of_vocabulary": 1}
    of_answers = {
        "answers.token_out_of_vocabulary": 1,
        "answers.top_p": 1,
        "answers.untold": 1,
    }
    assert [step.left_out for step in outcome.metrics] == [of_answers | of_groups, of_groups]
    assert outcome.metrics[0].masked_answers == 3


def test_a_step_makes_good_answers_likelier_and_bad_ones_rarer(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    before = logprobs_of(policy, PROMPT, [GOOD, BAD])

    outcome, _ = run_steps(policy, job_of([on_policy({GOOD: 0.5, BAD: -0.5})], learner_settings))

    after = logprobs_of(policy, PROMPT, [GOOD, BAD])
    assert sum(after[0]) > sum(before[0]) + 0.01
    assert sum(after[1]) < sum(before[1]) - 0.01
    (step,) = outcome.metrics
    assert (step.step, step.groups, step.answers, step.tokens) == (1, 1, 2, 5)
    assert step.computed_tokens == 3 + 2 + 1
    assert step.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert step.clip_share == 0.0
    # At ratio 1 the loss is -sum(A) / N = -(3 * 0.5 - 2 * 0.5) / 5
    assert step.loss == pytest.approx(-0.1, abs=1e-5)
    assert outcome.drift is not None
    assert outcome.drift.max_abs < 1e-5
    assert outcome.drift.tokens == 5


def test_groups_are_dealt_over_the_steps_like_cards() -> None:
    groups = [make_group([1], [make_row([2])], group_id=str(number)) for number in range(5)]

    dealt = deal(groups, 2)

    assert [[g.group_id for g in step] for step in dealt] == [["0", "2", "4"], ["1", "3"]]
    assert [len(step) for step in deal(groups[:2], 1)] == [1, 1]
    assert [len(step) for step in deal(groups, 8)] == [5]


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    parameter = next(p for p in policy.model.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    before = parameter.detach().clone()

    with pytest.raises(
        NonFiniteError, match=r"its gradient is not finite; lower learner\.learning_rate"
    ):
        run_steps(policy, job_of([on_policy({GOOD: 0.5, BAD: -0.5})], learner_settings))

    assert torch.equal(parameter, before)


@pytest.mark.parametrize("advantage", [1e30, float("nan")])
def test_a_group_whose_gradient_overflows_is_left_out_alone(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner, advantage: float
) -> None:
    groups = [on_policy({GOOD: 0.5, BAD: -0.5}, group_id=name) for name in ("a", "b")]
    huge = replace(groups[0].rows[0], advantage=advantage)
    bad = replace(groups[0], group_id="bad", rows=(huge, groups[0].rows[1]))

    outcome, state = run_steps(policy, job_of([*groups, bad], learner_settings))

    assert {name: one.reason for name, one in outcome.faults.items()} == {
        "bad": "non_finite_gradient"
    }
    assert outcome.metrics[0].update_norm > 0
    assert all(bool(torch.isfinite(one).all()) for one in state.second.values())


def test_a_run_that_is_asked_to_stop_ends_between_packs(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    asked = iter([False, True])

    def check_stop() -> None:
        if next(asked):
            raise RunStoppedError("asked to stop")

    groups = [on_policy({GOOD: 0.5, BAD: -0.5}, group_id=str(i)) for i in range(3)]
    with pytest.raises(RunStoppedError):
        run_steps(policy, job_of(groups, learner_settings, check_stop=check_stop))


def test_a_group_whose_spread_was_that_of_a_drifting_answer_counts_as_quiet(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    groups = [on_policy({GOOD: 0.5, BAD: -0.5}, group_id=name) for name in ("a", "b")]
    good, bad = groups[0].rows
    far = replace(good, logprobs=tuple(value + 5.0 for value in good.logprobs))
    rows = (far, bad, bad, bad, good)
    flat = replace(groups[0], group_id="flat", rows=rows, scores=(0.95, 0.5, 0.5, 0.5, 0.51))
    settings = learner_settings.model_copy(update={"max_drift": 1.0})

    outcome, _ = run_steps(policy, replace(job_of([*groups, flat], settings), quiet=2))

    assert {name: one.reason for name, one in outcome.faults.items()} == {"flat": "no_spread"}
    assert outcome.algorithm["quiet_groups"] == 3


def test_the_algorithm_names_ranks_of_single_modules_and_the_gpu(
    policy: Policy,
    on_policy: OnPolicy,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank of the adapter and not that of the settings, which said 16 where 4 was real."""
    policy.model.peft_config[ADAPTER].rank_pattern = {"v_proj": 2}
    other = learner_settings.model_copy(update={"rank": 16, "alpha": 32})
    groups = [on_policy({GOOD: 0.5, BAD: -0.5}) for _ in range(2)]

    outcome, _ = run_steps(policy, job_of(groups, other))

    assert (outcome.algorithm["rank"], outcome.algorithm["alpha"]) == (4, 8)
    assert outcome.algorithm["rank_pattern"] == {"v_proj": 2}
    assert "alpha_pattern" not in outcome.algorithm
    assert outcome.algorithm["accelerator"] is None, "a CPU"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H100 {device.index}")
    assert accelerator(torch.device("cuda", 1)) == "H100 1"


def test_groups_left_out_for_their_spread_make_the_steps_smaller(
    tiny_base: Path, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    """Two steps of two groups, with and without four quiet ones: two of them in each step."""
    groups = [on_policy({GOOD: 0.5, BAD: -0.5}) for _ in range(4)]
    settings = learner_settings.model_copy(update={"groups_per_step": 2})
    moved = []
    for quiet in (0, 4):
        policy = load_policy(str(tiny_base), Parent(name="base"), settings)
        job = replace(job_of(groups, settings), quiet=quiet)
        outcome, _ = run_steps(policy, job)
        moved.append([step.update_norm for step in outcome.metrics])
        assert outcome.algorithm["quiet_groups"] == quiet

    assert moved[1][0] == pytest.approx(moved[0][0] / 2, rel=0.02)
    assert moved[1][1] < 0.75 * moved[0][1]
