"""The clipped surrogate, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from learner.grpo.losses import ClipRange, TokenLoss, grpo

CLIP = ClipRange(low=0.2, high=0.28)


def loss_of(ratios: list[float], advantages: list[float]) -> tuple[TokenLoss, Tensor]:
    """The loss where the recorded log-probability is -1 throughout. Returns it and the leaf."""
    logprobs = torch.tensor([-1.0 + math.log(r) for r in ratios], dtype=torch.float64)
    logprobs.requires_grad_()
    recorded = torch.full_like(logprobs, -1.0).detach()
    return grpo(logprobs, recorded, torch.tensor(advantages, dtype=torch.float64), CLIP), logprobs


def gradient(ratios: list[float], advantages: list[float]) -> list[float]:
    loss, logprobs = loss_of(ratios, advantages)
    loss.loss_sum.backward()
    assert logprobs.grad is not None
    return list(logprobs.grad)


def test_the_loss_is_minus_ratio_times_advantage_within_the_clip() -> None:
    loss, _ = loss_of([1.1, 0.9], [0.5, -0.5])
    # -(1.1 * 0.5) - (0.9 * -0.5) = -0.55 + 0.45
    assert loss.loss_sum.item() == pytest.approx(-0.10)
    assert loss.clipped == 0


def test_a_good_token_gains_nothing_beyond_the_upper_clip() -> None:
    loss, _ = loss_of([1.5], [0.5])
    assert loss.loss_sum.item() == pytest.approx(-0.64)  # 1.28 * 0.5
    assert loss.clipped == 1
    assert gradient([1.5], [0.5]) == [0.0]


def test_a_bad_token_gains_nothing_below_the_lower_clip() -> None:
    loss, _ = loss_of([0.5], [-0.5])
    assert loss.loss_sum.item() == pytest.approx(0.40)  # 0.8 * 0.5
    assert loss.clipped == 1
    assert gradient([0.5], [-0.5]) == [0.0]


def test_what_went_the_wrong_way_is_never_clipped() -> None:
    # A good token grown rarer, a bad token grown likelier: gradient is -r A in full.
    assert gradient([0.5, 1.5], [0.5, -0.5]) == pytest.approx([-0.25, 0.75])
    assert loss_of([0.5, 1.5], [0.5, -0.5])[0].clipped == 0


def test_at_ratio_one_the_gradient_is_reinforce() -> None:
    # d/dlogp of -A logp is -A
    assert gradient([1.0, 1.0, 1.0], [0.5, -0.5, 0.25]) == pytest.approx([-0.5, 0.5, -0.25])


def test_a_positive_advantage_pushes_the_log_probability_up() -> None:
    assert gradient([1.0], [0.3])[0] < 0  # descent goes against the gradient
    assert gradient([1.0], [-0.3])[0] > 0


def test_no_advantage_no_gradient() -> None:
    assert gradient([0.7, 1.0, 1.4], [0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]


def test_the_statistics_are_sums_over_the_tokens() -> None:
    loss, _ = loss_of([2.0, 0.5], [1.0, 1.0])
    # k3: (2 - 1 - ln 2) + (0.5 - 1 + ln 2) = 1 - 0.5 = 0.5
    assert loss.ratio_sum == pytest.approx(2.5)
    assert loss.kl_sum == pytest.approx(0.5)
    assert loss.clipped == 1


def test_sums_do_not_depend_on_how_the_tokens_are_cut() -> None:
    whole, _ = loss_of([1.1, 0.9, 1.5, 0.4], [0.5, -0.5, 0.2, -0.2])
    parts = [loss_of([1.1, 0.9], [0.5, -0.5])[0], loss_of([1.5, 0.4], [0.2, -0.2])[0]]
    assert whole.loss_sum.item() == pytest.approx(sum(part.loss_sum.item() for part in parts))
