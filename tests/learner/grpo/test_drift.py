"""Drift by answer, by group and in all; whose adapter an answer is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from learner.errors import DriftError
from learner.grpo.answers import NOISE_DEVIATIONS, TOKEN_NOISE, excess, measure
from learner.grpo.trainer import run_steps
from learner.policy.adapter_io import load_policy, save_adapter
from learner.policy.logprobs import Policy
from learner.records import Drift, Parent, TrainingGroup, TrainingJob
from sidecar.settings import Learner
from tests.learner.conftest import job_of, logprobs_of, make_group, make_row, on_policy, with_effect

PROMPT = (1, 2, 3)
ANSWERS = tuple(tuple(range(first, first + 12)) for first in (4, 10, 16, 22, 28, 34, 8, 14))


def test_drift_is_measured_from_the_differences() -> None:
    drift = measure([0.1, -0.3, 0.2])

    assert drift.mean == pytest.approx(0.0, abs=1e-12)
    assert drift.mean_abs == pytest.approx(0.2)
    assert drift.max_abs == pytest.approx(0.3)
    # (e^-0.1 + e^0.3 + e^-0.2) / 3 = (0.904837 + 1.349859 + 0.818731) / 3
    assert drift.ratio_mean == pytest.approx(1.024476, abs=1e-6)
    assert drift.tokens == 3


def test_few_tokens_are_allowed_the_noise_of_their_mean_and_no_more() -> None:
    for tokens in (1, 4, 100, 10_000):
        allowed = 0.1 + NOISE_DEVIATIONS * TOKEN_NOISE / math.sqrt(tokens)
        inside = Drift(
            mean=0.0, mean_abs=allowed - 1e-6, max_abs=1.0, ratio_mean=1.0, tokens=tokens
        )
        assert excess(inside, 0.1) is None
        assert excess(replace(inside, mean_abs=allowed + 1e-6), 0.1) is not None


def test_a_ratio_far_from_one_is_too_much_though_the_mean_is_small() -> None:
    drift = Drift(mean=0.0, mean_abs=0.05, max_abs=3.0, ratio_mean=1.2, tokens=1000)

    assert "before the first step is 1.2000" in (excess(drift, 0.1) or "")


Sampled = Callable[..., TrainingGroup]


@pytest.fixture
def sampled() -> Sampled:
    """sampled(policy, group_id, adapter=, shifts=): recorded under this policy, and shifted."""

    def make(
        under: Policy, group_id: str, *, adapter: str = "base", shifts: Sequence[float] = (0.0,) * 8
    ) -> TrainingGroup:
        rows = [make_row(ids, (-1.0) ** place / 2) for place, ids in enumerate(ANSWERS)]
        found = on_policy(under, make_group(PROMPT, rows, adapter=adapter, group_id=group_id))
        moved = [
            replace(one, logprobs=tuple(value + shift for value in one.logprobs))
            for one, shift in zip(found.rows, shifts, strict=True)
        ]
        return replace(found, rows=tuple(moved))

    return make


def job(
    groups: Sequence[TrainingGroup],
    settings: Learner,
    *,
    parent: Parent | None = None,
    samplers: Sequence[Parent] = (),
) -> TrainingJob:
    named = {one.name: one for one in samplers}
    return job_of(groups, settings, parent=parent or Parent(name="base"), samplers=named)


def test_the_answer_that_drifts_is_left_out_alone(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    """0.437 nats of one answer in eight are 0.055 in the mean of its group."""
    groups = [
        sampled(policy, "good"),
        sampled(policy, "one", shifts=(0.0, 0.437, *(0.0,) * 6)),
    ]

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert outcome.faults == {}
    assert outcome.answers["one"].left_out == {1: "drift"}
    assert outcome.answers["good"].left_out == {}
    assert outcome.metrics[0].answers == 15
    assert outcome.drift is not None
    assert outcome.drift.mean_abs < 1e-5


def test_a_group_that_drifts_is_left_out_alone(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    """0.437 nats of one group in five are 0.087 in the mean of the step, under the limit of 0.1."""
    groups = [sampled(policy, str(number)) for number in range(4)]
    groups.append(sampled(policy, "bad", shifts=(0.437,) * 8))

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert [(name, fault.reason) for name, fault in outcome.faults.items()] == [("bad", "drift")]
    assert "8 of 8 answers drift" in outcome.faults["bad"].text
    assert "differ by 0.4370 nats a token over 12 tokens" in outcome.faults["bad"].text
    assert outcome.metrics[0].groups == 4


def test_a_group_drifts_though_none_of_its_answers_does_by_itself(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    # An answer of 12 tokens may be off by 0.1 + 0.3 / sqrt(12) = 0.187, the group of 96 by 0.131.
    groups = [sampled(policy, "good"), sampled(policy, "bad", shifts=(0.15,) * 8)]

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert "over 96 tokens; 0.1306 is allowed" in outcome.faults["bad"].text


def test_all_groups_drift_though_none_does_by_itself(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    groups = [sampled(policy, str(number), shifts=(0.125,) * 8) for number in range(8)]

    with pytest.raises(DriftError, match=r"all groups together drift: .* 0\.1250 nats"):
        run_steps(policy, job(groups, learner_settings))


@pytest.fixture
def ancestor(
    policy: Policy, tiny_base: Path, tmp_path: Path, learner_settings: Learner
) -> tuple[Policy, Parent]:
    """A version of another rank whose answers differ from the base's, and what the store says."""
    other = load_policy(
        str(tiny_base), Parent(name="base"), learner_settings.model_copy(update={"rank": 2})
    )
    with_effect(other)
    folder = tmp_path / "ancestor"
    folder.mkdir()
    save_adapter(other, folder)
    return other, Parent(name="v1", version=1, digest=folder_digest(folder), path=folder)


def test_a_stale_group_is_compared_with_the_adapter_that_sampled_it(
    policy: Policy,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
) -> None:
    """No group of this run was sampled by its parent, and every one is checked."""
    under, version = ancestor
    groups = [
        sampled(under, "exact", adapter="v1"),
        sampled(under, "second", adapter="v1"),
        sampled(policy, "of the base, said to be of v1", adapter="v1"),
    ]
    gap = [
        abs(a - b)
        for one, other in zip(groups[0].rows, groups[2].rows, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    assert sum(gap) / len(gap) > 0.3
    before = logprobs_of(policy, PROMPT, ANSWERS)

    no_steps = learner_settings.model_copy(update={"learning_rate": 1e-30})
    outcome, _ = run_steps(policy, job(groups, no_steps, samplers=[version]))

    assert [(name, fault.reason) for name, fault in outcome.faults.items()] == [
        ("of the base, said to be of v1", "drift")
    ]
    assert outcome.drift is not None
    assert outcome.drift.max_abs < 1e-5
    # The ratio is against what was recorded: far from 1 for another adapter's answers.
    assert outcome.metrics[0].approx_kl > 0.01
    assert logprobs_of(policy, PROMPT, ANSWERS) == before
    assert {p.requires_grad for n, p in policy.model.named_parameters() if "lora" in n} == {True}
    assert list(policy.model.peft_config) == ["default"]


def test_a_group_of_the_base_is_compared_with_the_base(
    policy: Policy,
    tiny_base: Path,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
) -> None:
    under, version = ancestor
    of_rank = learner_settings.model_copy(update={"rank": 2})
    trained = load_policy(str(tiny_base), version, of_rank)
    groups = [
        sampled(policy, "of the base"),
        sampled(under, "of the parent", adapter="v1"),
        sampled(under, "of the parent, said to be of the base"),
    ]

    outcome, _ = run_steps(trained, job(groups, learner_settings, parent=version))

    assert list(outcome.faults) == ["of the parent, said to be of the base"]


def test_behind_a_grammar_the_free_tokens_are_trained_as_if_they_were_all(
    tiny_base: Path, policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    """Every third token is recorded as a grammar of the server would: above the policy's own. The
    run equals, to the bit, one whose rows say which tokens they keep."""
    whole = sampled(policy, "g")
    free = tuple(at % 3 != 0 for at in range(12))
    raised = [
        replace(
            row,
            logprobs=tuple(
                value if keep else min(value + 1.5, -0.001)
                for value, keep in zip(row.logprobs, free, strict=True)
            ),
        )
        for row in whole.rows
    ]
    touched = replace(whole, rows=tuple(raised), masked_by="masked_by_response_format")
    told = replace(whole, rows=tuple(replace(row, kept=free) for row in whole.rows))
    other = load_policy(str(tiny_base), Parent(name="base"), learner_settings)

    outcome, _ = run_steps(policy, job([touched], learner_settings))
    expected, _ = run_steps(other, job([told], learner_settings))

    assert outcome.answers["g"].masked_tokens == dict.fromkeys(range(8), 4)
    assert outcome.answers["g"].tokens == 64
    (step,) = outcome.metrics
    assert (step.tokens, step.masked_tokens, step.answer_tokens) == (64, 32, 12)
    assert step.grad_norm == expected.metrics[0].grad_norm > 0
    assert logprobs_of(policy, PROMPT, ANSWERS) == logprobs_of(other, PROMPT, ANSWERS)
    assert outcome.drift is not None
    assert outcome.drift.max_abs < 1e-5


@pytest.mark.parametrize("kind", ["no row", "no folder", "altered", "nonsense"])
def test_a_group_whose_sampler_is_not_at_hand_is_not_trained_on(
    policy: Policy,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
    kind: str,
) -> None:
    under, version = ancestor
    folder = version.path
    assert folder is not None
    if kind == "no folder":
        version = replace(version, path=folder / "gone")
    if kind == "altered":
        (folder / WEIGHTS).write_bytes(b"x" + (folder / WEIGHTS).read_bytes()[1:])
    if kind == "nonsense":
        (folder / CONFIG).write_text("[]")
    groups = [sampled(policy, "own"), *(sampled(under, str(n), adapter="v1") for n in range(3))]

    samplers = [] if kind == "no row" else [version]
    outcome, _ = run_steps(policy, job(groups, learner_settings, samplers=samplers))

    assert {fault.reason for fault in outcome.faults.values()} == {"drift_unchecked"}
    assert list(outcome.faults) == ["0", "1", "2"]
    assert outcome.metrics[0].groups == 1


def test_a_run_without_any_checked_group_trains_on_nothing(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    groups = [sampled(policy, str(n), adapter="v1") for n in range(3)]

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert outcome.metrics == ()
    assert outcome.drift is None
    assert len(outcome.faults) == 3
