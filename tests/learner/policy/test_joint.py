"""Several groups in one pack: each has the values and the gradient that it has alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from learner.errors import FaultyGroupsError
from learner.grpo.checks import attempt, with_start
from learner.grpo.trainer import run_steps
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy, joint_groups, joint_pack
from learner.policy.packing import Pack
from learner.records import Parent, TrainingGroup
from sidecar.settings import Advanced, Learner
from tests.learner.conftest import job_of, make_group, make_row

SYSTEM = [3, 4, 5, 6, 7, 8] * 3
WITHOUT_EFFECT = 40


@pytest.fixture
def groups() -> list[TrainingGroup]:
    """Two that begin alike, the second with the history of the first; and one that does not."""
    return [
        make_group([*SYSTEM, 20], [make_row([9, 10, 11]), make_row([12, 13])], group_id="turn 1"),
        make_group([30, 31], [make_row([9, 10]), make_row([14, 15])], group_id="other"),
        make_group(
            [*SYSTEM, 20, 9, 10, 11, 21],
            [make_row([16, 17], temperature=0.5), make_row([18, 19, 20], kept=[True, False, True])],
            group_id="turn 2",
        ),
    ]


def test_groups_that_begin_alike_are_computed_together(groups: list[TrainingGroup]) -> None:
    assert joint_groups(groups, max_tokens=100) == [[0, 2], [1]]
    # 19 for all, 12, 9 10, and behind them 11 21 16 and 11 21 18 19: what is short is not shared
    assert joint_groups(groups, max_tokens=29) == [[0, 2], [1]]
    assert joint_groups(groups, max_tokens=28) == joint_groups(groups) == [[0], [2], [1]]

    pack = joint_pack([groups[0], groups[2]])

    assert len(pack.input_ids) == 29
    assert pack.targets == (9, 10, 11, 12, 13, 16, 17, 18, 20)
    assert pack.answers == (0, 0, 0, 1, 1, 2, 2, 3, 3)


def test_packs_are_filled_with_groups_up_to_their_tokens() -> None:
    """Of 5 tokens; the last of 12: it shares too little."""
    short = [make_group((number, 2, 3), [make_row((4, 5, 6))]) for number in range(1, 6)]
    groups = [*short, make_group((6, 2, 3, 4), [make_row((4, 5, 6)), make_row((5, 6, 7))])]

    assert joint_groups(groups, room=10) == [[0, 1], [2, 3], [4], [5]]
    assert joint_groups(groups, room=22) == [[0, 1, 2, 3], [4, 5]]
    assert joint_groups(groups, room=4) == [[0], [1], [2], [3], [4], [5]]


def test_each_group_gets_the_values_that_it_has_alone(
    tiny_base: Path, learner_settings: Learner, groups: list[TrainingGroup]
) -> None:
    policy = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    apart = learner_settings.model_copy(update={"pack_tokens": WITHOUT_EFFECT})

    found, faults = with_start(policy, groups, job_of(groups, apart))

    assert not faults
    assert [one.group_id for one in found] == ["turn 1", "other", "turn 2"]
    for one, group in zip(found, groups, strict=True):
        (alone,), _ = with_start(policy, [group], job_of([group], apart))
        for row, expected in zip(one.rows, alone.rows, strict=True):
            assert row.start == pytest.approx(expected.start, abs=5e-6)  # ten roundings of fp32
            assert len(row.start) == len(row.token_ids)


@pytest.mark.parametrize("how", ["raises", "not a number"])
def test_a_group_that_fails_in_a_joint_pack_fails_alone(
    tiny_base: Path,
    learner_settings: Learner,
    groups: list[TrainingGroup],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    policy = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    true = Policy.logprobs

    def broken(self: Policy, pack: Pack) -> tuple[torch.Tensor, float]:
        values, entropy = true(self, pack)
        if 21 not in pack.input_ids:  # a token of the third group's prompt
            return values, entropy
        if how == "raises":
            raise RuntimeError("shapes")
        return values * torch.nan, entropy

    monkeypatch.setattr(Policy, "logprobs", broken)
    with capture_logs() as logs:
        found, faults = with_start(policy, groups, job_of(groups, learner_settings))

    assert [one["event"] for one in logs if one["event"] == "joint_pack_failed"]
    assert list(faults) == (["turn 2"] if how == "raises" else [])
    assert [one.group_id for one in found][:2] == ["turn 1", "other"]
    assert all(value == value for one in found[:2] for row in one.rows for value in row.start)


def test_models_that_do_not_pack_are_computed_one_by_one(
    tiny_base: Path, learner_settings: Learner, groups: list[TrainingGroup]
) -> None:
    policy = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    rows = replace(policy, shape=replace(policy.shape, packs=False))

    found, _ = with_start(rows, groups, job_of(groups, learner_settings))
    together, _ = with_start(policy, groups, job_of(groups, learner_settings))

    for one, other in zip(found, together, strict=True):
        for row, same in zip(one.rows, other.rows, strict=True):
            assert row.start == pytest.approx(same.start, abs=1e-5)


@pytest.mark.parametrize("loss", ["dppo_tv", "grpo", "gspo", "cispo"])
def test_groups_that_share_a_pack_take_the_steps_that_they_take_alone(
    tiny_base: Path,
    learner_settings: Learner,
    groups: list[TrainingGroup],
    loss: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three groups, the last two in one pack; with the divergence from the base in the loss."""
    monkeypatch.setattr("learner.grpo.trainer.KL_BUDGET", 0.0)
    advanced = Advanced(kl_coef=0.1)
    settings = learner_settings.model_copy(update={"loss": loss, "advanced": advanced})
    settings = settings.model_copy(update={"max_drift": 100.0, "learning_rate": 0.005})
    found, computed = [], []
    for joint in (0, 30):
        policy = replace(load_policy(str(tiny_base), Parent(name="base"), settings), joint=joint)
        pushed = [_pushed(one) for one in groups]
        outcome, _ = run_steps(policy, job_of(pushed * 2, settings))
        trained = [p.detach().flatten() for p in policy.model.parameters() if p.requires_grad]
        step = replace(outcome.metrics[0], seconds=0.0, tokens_per_s=0.0, peak_memory_bytes=0)
        computed.append(step.computed_tokens)
        figures = replace(step, left_out={}, computed_tokens=0).flat
        known = {name: value for name, value in figures.items() if value is not None}
        found.append((known, torch.cat(trained)))
    (alone, weights), (together, same) = found

    assert computed[1] < computed[0], "what groups share is computed once"
    assert together == pytest.approx(alone, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(same, weights, atol=2e-6, rtol=1e-4)


def test_a_group_that_fails_in_a_common_pack_is_left_out_alone(
    tiny_base: Path, learner_settings: Learner, groups: list[TrainingGroup]
) -> None:
    settings = learner_settings.model_copy(update={"max_drift": 100.0})
    policy = load_policy(str(tiny_base), Parent(name="base"), settings)
    first, other, last = map(_pushed, groups)
    huge = replace(other.rows[0], advantage=1e30)
    other = replace(other, rows=(huge, *other.rows[1:]))

    with capture_logs() as logs:
        outcome, _ = run_steps(replace(policy, joint=100), job_of([first, other, last], settings))

    failed = [one["groups"] for one in logs if one["event"] == "joint_pack_failed"]
    assert failed == [3], "once: the run goes on without common packs"
    assert {name: one.reason for name, one in outcome.faults.items()} == {
        "other": "non_finite_gradient"
    }
    assert [step.groups for step in outcome.metrics] == [2]
    assert outcome.metrics[0].update_norm > 0


def test_no_group_is_named_for_a_gpu_that_fails_in_a_common_pack(
    learner_settings: Learner, groups: list[TrainingGroup]
) -> None:
    """An error that names groups is no reason to look for others that may have caused it."""

    def compute() -> None:
        raise torch.AcceleratorError("an illegal memory access")

    for name, named in (("", {}), ("g", {"g"})):
        with pytest.raises(FaultyGroupsError, match="the GPU failed while it computed") as error:
            attempt(name, job_of(groups, learner_settings), compute)
        assert set(error.value.faults) == set(named)


def _pushed(group: TrainingGroup) -> TrainingGroup:
    rows = zip(group.rows, (0.5, -0.5), strict=True)
    return replace(group, rows=tuple(replace(row, advantage=way) for row, way in rows))
