"""The divergence from the base: against exact sums over tiny distributions, and in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from learner.grpo.base_kl import (
    MEASURED_TO,
    PULLED_TO,
    SAMPLED_ANSWERS,
    BaseKl,
    base_logprobs,
    k3,
    measure_base_kl,
    penalty,
    sample_answers,
)
from learner.grpo.trainer import kl_weight, run_steps
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy, packs_of
from learner.records import Parent
from sidecar.settings import Advanced, Learner
from tests.learner.conftest import job_of, make_group, make_row, on_policy, with_effect

P = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)


def test_its_mean_over_the_policy_is_the_exact_divergence() -> None:
    exact = float((P * (P / Q).log()).sum())
    # 0.5 log 2 + 0 - 0.25 log 2, by hand
    assert exact == pytest.approx(0.25 * 0.6931471805599453)

    assert float((P * k3(P.log(), Q.log())).sum()) == pytest.approx(exact, abs=1e-12)
    assert float(k3(P.log(), Q.log()).min()) >= 0
    assert k3(P.log(), P.log()).tolist() == [0.0] * 4


def test_its_gradient_over_the_policy_is_that_of_the_divergence_of_the_base() -> None:
    scores = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(scores, -1)
    weighted = logp.detach().exp() * penalty(logp, Q.log())
    (estimated,) = torch.autograd.grad(weighted.sum(), scores)
    logp = torch.log_softmax(scores, -1)
    (exact,) = torch.autograd.grad((Q * (Q.log() - logp)).sum(), scores)

    assert torch.allclose(estimated, exact, atol=1e-12)


@pytest.mark.parametrize(
    ("lost", "pull"),
    [
        (-1.0, -0.6321205588),  # the policy gives it more often than the base: e^-1 - 1
        (9.9, 19929.37044),
        (10.0, 22025.46579),  # e^10 - 1
        (500.0, 22025.46579),
    ],
)
def test_the_pull_grows_with_what_was_lost_and_never_vanishes(lost: float, pull: float) -> None:
    """In fp32, as a run has it; the base gives the token 0.9 of the time (-0.1 nats)."""
    # At 10 nats the ratio is exact in fp32: both branches meet there, and one alone may count.
    base = torch.tensor([0.0 if lost == 10.0 else -0.1])
    logp = (base - lost).requires_grad_()
    penalty(logp, base).sum().backward()

    assert logp.grad is not None
    assert -float(logp.grad) == pytest.approx(pull, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("cut", [PULLED_TO, MEASURED_TO])
def test_value_and_slope_are_those_of_k3_up_to_the_cut_and_its_tangent_above(cut: float) -> None:
    """The reference is numpy's, its slope by central differences."""
    lost = np.array([-3.0, 0.5, 4.0, cut - 0.5, cut - 1e-3, cut + 1e-3, cut + 0.5, cut + 5.0, 60.0])

    def reference(x: NDArray[np.float64]) -> NDArray[np.float64]:
        tangent = np.expm1(cut) - cut + np.expm1(cut) * (x - cut)
        return np.asarray(np.where(x <= cut, np.expm1(x) - x, tangent))

    slope = (reference(lost + 1e-5) - reference(lost - 1e-5)) / 2e-5
    logp = torch.tensor(-lost, requires_grad=True)
    found = k3(logp, torch.zeros_like(logp), cut)
    (gradient,) = torch.autograd.grad(found.sum(), logp)

    assert found.detach().numpy() == pytest.approx(reference(lost), rel=1e-9)
    assert -gradient.numpy() == pytest.approx(slope, rel=1e-4)


def test_what_is_measured_is_k3_as_far_as_20_nats_and_larger_beyond() -> None:
    def value(lost: float) -> float:
        return float(k3(torch.tensor([-lost], dtype=torch.float64), torch.zeros(1)))

    assert value(15.0) == pytest.approx(3269001.37, abs=0.01)  # e^15 - 16
    assert value(20.0) == pytest.approx(485165174.41, abs=0.01)  # e^20 - 21
    assert value(22.0) == pytest.approx(485165174.41 + 2 * 485165194.41, abs=0.1)


def test_a_policy_that_lost_a_token_for_ever_is_measured_as_far_away(
    policy: Policy, learner_settings: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(pack: Any) -> tuple[torch.Tensor, float]:
        return torch.full((len(pack.targets),), -float("inf")), 0.0

    monkeypatch.setattr("learner.grpo.base_kl.base_logprobs", lambda *_: torch.tensor([-0.1] * 3))
    monkeypatch.setattr(type(policy), "logprobs", lambda self, pack: lost(pack))
    groups = [make_group((1, 2), [make_row((5, 6, 7)), make_row((8, 9, 10), -1.0)])]

    found = measure_base_kl(policy, groups, job_of(groups, learner_settings), turn=0)

    assert found is not None
    assert found.bounded == 100.0


@pytest.fixture
def moved(policy: Policy) -> Policy:
    return with_effect(policy, 0.2)


def test_a_fresh_adapter_is_the_base(policy: Policy, learner_settings: Learner) -> None:
    groups = [make_group((1, 2), [make_row((5, 6, 7)), make_row((8,), -1.0)])]

    found = measure_base_kl(policy, groups, job_of(groups, learner_settings), turn=1)

    assert found is not None
    assert found.nats == pytest.approx(0.0, abs=1e-6)
    assert found.tokens == 1, "the second answer's"


def test_all_first_tokens_weighted_give_the_exact_divergence_of_the_model(
    moved: Policy, learner_settings: Learner
) -> None:
    """The whole vocabulary as answers of one token: the exact sum over the next token."""
    everything = make_group((1, 2, 3), [make_row((token,)) for token in range(moved.vocabulary)])
    (pack,) = packs_of(moved, everything, 10_000)
    with torch.no_grad():
        logp_V = moved.logprobs(pack)[0].double()
        base_V = base_logprobs(moved, pack).double()
        with moved.model.disable_adapter():
            logits_V = moved.model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].double()
    exact = float((logp_V.exp() * (logp_V - base_V)).sum())

    assert torch.allclose(base_V, torch.log_softmax(logits_V, -1), atol=1e-5)
    assert exact > 0.01
    assert float((logp_V.exp() * k3(logp_V, base_V)).sum()) == pytest.approx(exact, abs=1e-5)


def test_the_sample_is_bounded_spread_and_turns() -> None:
    rows = [make_row((1,)), make_row((2, 2), trainable=False), make_row((3, 3, 3))]
    groups = [make_group((9,), rows, group_id=str(at)) for at in range(40)]

    first, second = sample_answers(groups, 0), sample_answers(groups, 1)

    assert [one.group_id for one in first] == [str(5 * at) for at in range(SAMPLED_ANSWERS)]
    assert [len(one.rows[0].token_ids) for one in first] == [1, 3] * 4
    assert [len(one.rows[0].token_ids) for one in second] == [3, 1] * 4
    assert sample_answers([make_group((9,), [rows[1]])], 0) == []


@pytest.mark.parametrize(
    ("groups", "taken"),
    [(3, [0, 1, 2]), (9, [*range(8)]), (15, [0, 1, 3, 5, 7, 9, 11, 13])],
)
def test_the_sample_reaches_over_all_groups_whatever_their_number(
    groups: int, taken: list[int]
) -> None:
    made = [
        make_group((9,), [make_row((1,)), make_row((2,))], group_id=str(at)) for at in range(groups)
    ]

    assert [one.group_id for one in sample_answers(made, 0)] == [str(at) for at in taken]


@pytest.mark.parametrize(
    ("away", "weight"),
    [
        (BaseKl(0.21, 9, 0.21), 0.25),
        (BaseKl(0.2, 9, 0.2), 0.0),
        (BaseKl(0.1, 9, 0.1), 0.0),
        (None, 0.0),
    ],
)
def test_the_term_works_over_the_budget_alone(away: BaseKl | None, weight: float) -> None:
    assert kl_weight(away, Learner()) == 0.0, "nobody asked for it"
    assert kl_weight(away, Learner(advanced=Advanced(kl_coef=0.25))) == weight


def test_the_term_holds_the_policy_nearer_to_the_base(
    tiny_base: Path, learner_settings: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.grpo.trainer.KL_BUDGET", 0.0)

    def after(coef: float) -> tuple[float, list[float]]:
        settings = learner_settings.model_copy(
            update={
                "groups_per_step": 1,
                "learning_rate": 0.005,
                "advanced": Advanced(kl_coef=coef),
                "max_drift": 10.0,
            }
        )
        policy = load_policy(str(tiny_base), Parent(name="base"), settings)
        answers = {(10, 11, 12): 0.5, (20, 21): -0.5}
        rows = [make_row(ids, way) for ids, way in answers.items()]
        groups = [on_policy(policy, make_group((1, 2, 3), rows, group_id=name)) for name in "abcd"]
        outcome, _ = run_steps(policy, job_of(groups, settings))
        kl = outcome.algorithm["kl_to_base"]
        assert isinstance(kl, float)
        return kl, [step.kl_coef for step in outcome.metrics]

    free, weights = after(0.0)
    held, held_weights = after(5.0)

    assert weights == [0.0] * 4
    assert held_weights[1:] == [5.0] * 3, "in the first step the adapter is the base"
    assert 0 < held < free


def test_each_step_has_its_divergence(policy: Policy, learner_settings: Learner) -> None:
    settings = learner_settings.model_copy(update={"groups_per_step": 1, "max_drift": 10.0})
    groups = [
        make_group((1, 2), [make_row((5, 6), 0.5), make_row((8,), -0.5)], group_id=name)
        for name in ("a", "b")
    ]

    outcome, _ = run_steps(policy, job_of(groups, settings))

    first, second = outcome.metrics
    assert first.kl_base == pytest.approx(0.0, abs=1e-6)
    assert second.kl_base is not None
    assert second.kl_base > 1e-6
    assert first.kl_base_tokens > 0
    assert outcome.algorithm["kl_to_base_tokens"] == 3, "two of one group, one of the other"
