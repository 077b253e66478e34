"""The optimiser steps on a tiny model: signs, masks, invariances, and what stops a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from learner.errors import NonFiniteError, RunStoppedError
from learner.grpo.chance import deal
from learner.grpo.checks import with_start
from learner.grpo.losses import objective
from learner.grpo.optimizer import SignalAdamW
from learner.grpo.trainer import accelerator, accumulate, rate_of, run_steps
from learner.policy.adapter_io import ADAPTER, load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import (
    Parent,
    Phase,
    Stage,
    StepMetrics,
    TrainableRow,
    TrainingGroup,
)
from sidecar.settings import Learner
from tests.learner.conftest import job_of

if TYPE_CHECKING:
    from tests.learner.conftest import MakeGroup, MakeRow


PROMPT = (1, 2, 3)
GOOD, BAD = (10, 11, 12), (20, 21)


OnPolicy = Callable[..., TrainingGroup]


@pytest.fixture
def on_policy(policy: Policy, group: MakeGroup, row: MakeRow) -> OnPolicy:
    """on_policy({ids: advantage}): a group whose recorded log-probabilities are the policy's."""

    def make(answers: dict[tuple[int, ...], float], **options: Any) -> TrainingGroup:
        rows = [
            row(ids, advantage, logprobs=logprobs_of(policy, PROMPT, [ids])[0].tolist())
            for ids, advantage in answers.items()
        ]
        return group(PROMPT, rows, **options)

    return make


def logprobs_of(
    policy: Policy, prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    rows = [
        TrainableRow(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            advantage=0.0,
            temperature=1.0,
            trainable=True,
        )
        for ids in answers
    ]
    group = TrainingGroup(
        group_id="", adapter="", prompt_token_ids=tuple(prompt), rows=tuple(rows), scores=(0.0,)
    )
    (pack,) = pack_group(group, max_tokens=1000)
    with torch.no_grad():
        return list(policy.logprobs(pack)[0].split([len(ids) for ids in answers]))


def gradient(policy: Policy, groups: Sequence[TrainingGroup], settings: Learner) -> torch.Tensor:
    """The whole LoRA gradient of one step over these groups, flat."""
    parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    optimizer = SignalAdamW(parameters, rate_of(settings, 576))
    accumulate(policy, groups, job_of(groups, settings), objective(settings), optimizer)
    return torch.cat([one.flatten() for one in optimizer.gradient.values()])


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
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner, row: MakeRow
) -> None:
    one = on_policy({GOOD: 0.5, BAD: -0.5})
    one = replace(one, rows=(*one.rows, row((30,) * 9, trainable=False)), scores=(1.0, 0.0, 0.5))
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
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner, row: MakeRow
) -> None:
    """Two answers came masked, one of them without a reason; the check leaves one more out, and a
    group; the other step has groups of its own, and knows of that group too."""
    foreign = (48, 48)  # outside of the vocabulary
    more = (row((30,), trainable=False), row((31,), trainable=False), row(foreign))
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
    assert after[0].sum() > before[0].sum() + 0.01
    assert after[1].sum() < before[1].sum() - 0.01
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


@pytest.mark.parametrize("loss", ["dppo_tv", "grpo", "gspo", "ppo_decoupled"])
def test_a_token_that_is_not_kept_has_no_part_in_the_loss_of_its_answer(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner, loss: str
) -> None:
    """Its recorded value is far off, and the step is that of the other tokens."""
    settings = learner_settings.model_copy(update={"loss": loss})
    exact = on_policy({GOOD: 0.7, BAD: -0.3})
    first, second = exact.rows
    touched = replace(first, logprobs=(-0.001, *first.logprobs[1:]), kept=(False, True, True))

    parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    groups = [replace(exact, rows=(touched, second))]
    aim = objective(settings)
    if aim.uses_start:
        anchored, faults = with_start(policy, groups, job_of(groups, settings))
        assert not faults
        assert anchored[0].rows[0].start == pytest.approx(touched.logprobs, abs=1e-5)
        groups = list(anchored)
    optimizer = SignalAdamW(parameters, rate_of(settings, 576))
    sums = accumulate(policy, groups, job_of(groups, settings), aim, optimizer)
    found = torch.cat([one.flatten() for one in optimizer.gradient.values()])

    policy.model.zero_grad()
    (pack,) = pack_group(exact, max_tokens=100)
    logprobs, _ = policy.logprobs(pack)
    good, bad = logprobs[1:3] * 0.7, logprobs[3:] * -0.3
    by_answer = loss in ("grpo", "gspo")
    mean = (good.mean() + bad.mean()) / 2 if by_answer else (good.sum() + bad.sum()) / 4
    (-mean).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad])

    assert sums.tokens == 4
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_prompt_tokens_have_no_target(policy: Policy, on_policy: OnPolicy) -> None:
    """The head's input at every prompt position but the last, which predicts the first answer
    token, gets exactly no gradient."""
    (pack,) = pack_group(on_policy({GOOD: 0.5, BAD: -0.5}), max_tokens=100)
    seen: list[torch.Tensor] = []
    decoder = policy.model.get_base_model().get_decoder()

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        seen.append(output.last_hidden_state)

    handle = decoder.register_forward_hook(keep)
    policy.logprobs(pack)[0].sum().backward()
    handle.remove()

    assert seen[0].grad is not None
    touched = seen[0].grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [False, False, True, True, True, True]


def test_groups_are_dealt_over_the_steps_like_cards(group: MakeGroup, row: MakeRow) -> None:
    groups = [group([1], [row([2])], group_id=str(number)) for number in range(5)]

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


@pytest.mark.parametrize("advantage", [1e30, -1e30, float("inf"), float("nan")])
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


def test_the_algorithm_names_the_rank_and_alpha_that_the_adapter_has(
    policy: Policy, on_policy: OnPolicy, learner_settings: Learner
) -> None:
    """Not those of the settings, which said 16 where 4 was real."""
    other = learner_settings.model_copy(update={"rank": 16, "alpha": 32})
    groups = [on_policy({GOOD: 0.5, BAD: -0.5}) for _ in range(2)]

    outcome, _ = run_steps(policy, job_of(groups, other))

    assert (outcome.algorithm["rank"], outcome.algorithm["alpha"]) == (4, 8)


def test_the_algorithm_names_ranks_of_single_modules_and_the_gpu(
    policy: Policy,
    on_policy: OnPolicy,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy.model.peft_config[ADAPTER].rank_pattern = {"v_proj": 2}
    groups = [on_policy({GOOD: 0.5, BAD: -0.5}) for _ in range(2)]

    outcome, _ = run_steps(policy, job_of(groups, learner_settings))

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
