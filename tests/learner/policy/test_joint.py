"""Several groups in one pack, without a gradient: each has the values that it has alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from structlog.testing import capture_logs

from learner.grpo.checks import with_start
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy, joint_groups, joint_pack, parts
from learner.policy.packing import Pack
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import job_of

if TYPE_CHECKING:
    from tests.learner.conftest import MakeGroup, MakeRow

SYSTEM = [3, 4, 5, 6, 7, 8]
WITHOUT_EFFECT = 40


@pytest.fixture
def groups(group: MakeGroup, row: MakeRow) -> list[TrainingGroup]:
    """Two that begin alike, the second with the history of the first; and one that does not."""
    return [
        group([*SYSTEM, 20], [row([9, 10, 11]), row([12, 13])], group_id="turn 1"),
        group([30, 31], [row([9, 10]), row([14, 15])], group_id="other"),
        group(
            [*SYSTEM, 20, 9, 10, 11, 21],
            [row([16, 17], temperature=0.5), row([18, 19, 20], kept=[True, False, True])],
            group_id="turn 2",
        ),
    ]


def test_groups_that_begin_alike_are_computed_together(groups: list[TrainingGroup]) -> None:
    assert joint_groups(groups, max_tokens=100) == [[0, 2], [1]]
    # 7 + 2 + 1 and behind 9 10: 11 21, 16, 18 19: 15 tokens
    assert joint_groups(groups, max_tokens=15) == [[0, 2], [1]]
    assert joint_groups(groups, max_tokens=14) == [[0], [2], [1]]

    pack = joint_pack([groups[0], groups[2]])

    assert len(pack.input_ids) == 15
    assert parts([groups[0], groups[2]]) == [5, 4]
    assert pack.targets == (9, 10, 11, 12, 13, 16, 17, 18, 20)


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
