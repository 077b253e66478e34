"""Losses, against numbers worked by hand.

`test_losses_against_trl.py` compares them with TRL's own code, values and LoRA gradients.
"""

from __future__ import annotations

import math

import pytest
import torch

from learner.grpo.losses import LOSSES, LossRule, Objective, Tokens

RULE = LossRule(clip_low=0.2, clip_high=0.28, tv_kl=0.0)
RECORDED = -1.0


def tokens_of(
    ratios: list[float],
    advantages: list[float],
    *,
    answers: list[int] | None = None,
    start: list[float] | None = None,
    recorded: float = RECORDED,
) -> Tokens:
    """Tokens whose recorded log-probability is `recorded`; start: pi_0 / mu of each."""
    logs = torch.tensor([recorded + math.log(r) for r in ratios], dtype=torch.float64)
    mu = torch.full_like(logs, recorded)
    return Tokens(
        logprobs_N=logs.requires_grad_(),
        recorded_N=mu,
        start_N=mu + torch.tensor([math.log(r) for r in start or [1.0] * len(ratios)]).double(),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        answers_N=torch.tensor(answers or [0] * len(ratios)),
    )


def losses_of(name: str, tokens: Tokens, rule: LossRule = RULE) -> list[float]:
    found: list[float] = LOSSES[name].per_token(tokens, rule).loss_N.tolist()
    return found


def gradient(name: str, tokens: Tokens, rule: LossRule = RULE) -> list[float]:
    LOSSES[name].per_token(tokens, rule).loss_N.sum().backward()
    assert tokens.logprobs_N.grad is not None
    found: list[float] = tokens.logprobs_N.grad.tolist()
    return found


def cut(name: str, tokens: Tokens, rule: LossRule = RULE) -> list[bool]:
    found: list[bool] = LOSSES[name].per_token(tokens, rule).cut_N.tolist()
    return found


CLIPPED = ("grpo", "dr_grpo", "dapo")


@pytest.mark.parametrize("bound", [3.0, 1.0])  # 1 is the least that may be set
@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_the_gradient_is_reinforce(name: str, bound: float) -> None:
    # d/dlogp of -A logp is -A. gspo shares it among the tokens of an answer: here one each.
    tokens = tokens_of([1.0, 1.0, 1.0], [0.5, -0.5, 0.25], answers=[0, 1, 2])
    rule = LossRule(negative_bound=bound)
    assert gradient(name, tokens, rule) == pytest.approx([-0.5, 0.5, -0.25])


@pytest.mark.parametrize("name", LOSSES)
def test_no_advantage_no_gradient(name: str) -> None:
    assert gradient(name, tokens_of([0.7, 1.0, 1.4], [0.0] * 3)) == pytest.approx([0.0] * 3)


@pytest.mark.parametrize("name", LOSSES)
def test_ratios_beyond_every_number_give_a_finite_loss_and_gradient(name: str) -> None:
    tokens = Tokens(
        logprobs_N=torch.tensor([-0.1, -900.0, -0.1, -900.0]).requires_grad_(),
        recorded_N=torch.tensor([-900.0, -0.1, -900.0, -0.1]),
        start_N=torch.tensor([-900.0, -0.1, -900.0, -0.1]),
        advantages_N=torch.tensor([0.5, 0.5, -0.5, -0.5]),
        answers_N=torch.tensor([0, 1, 2, 3]),
    )
    loss = LOSSES[name].per_token(tokens, LossRule()).loss_N.sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert tokens.logprobs_N.grad is not None
    assert torch.isfinite(tokens.logprobs_N.grad).all()


@pytest.mark.parametrize("name", CLIPPED)
def test_the_clipped_loss_is_minus_ratio_times_advantage_within_the_clip(name: str) -> None:
    assert losses_of(name, tokens_of([1.1, 0.9], [0.5, -0.5])) == pytest.approx([-0.55, 0.45])
    assert cut(name, tokens_of([1.1, 0.9], [0.5, -0.5])) == [False, False]


@pytest.mark.parametrize("name", CLIPPED)
def test_nothing_is_gained_beyond_the_clip(name: str) -> None:
    tokens = tokens_of([1.5, 0.5], [0.5, -0.5])
    assert losses_of(name, tokens) == pytest.approx([-0.64, 0.40])  # 1.28 * 0.5, 0.8 * 0.5
    assert cut(name, tokens) == [True, True]
    assert gradient(name, tokens) == [0.0, 0.0]


@pytest.mark.parametrize("name", CLIPPED)
def test_what_went_the_wrong_way_is_not_clipped_up_to_the_bound(name: str) -> None:
    # A good token grown rarer, bad tokens grown likelier: -r A, until r passes 3 for A < 0.
    tokens = tokens_of([0.5, 1.5, 2.9, 3.1], [0.5, -0.5, -0.5, -0.5])
    assert cut(name, tokens) == [False, False, False, True]
    assert gradient(name, tokens) == pytest.approx([-0.25, 0.75, 1.45, 0.0])


@pytest.mark.parametrize("name", CLIPPED)
def test_a_bound_within_the_clip_works_from_the_clip_on(name: str) -> None:
    # -min(r A, clip(r) A) takes the clipped ratio of a bad token where the bounded one is smaller.
    rule = LossRule(clip_low=0.2, clip_high=0.28, negative_bound=1.1)
    tokens = tokens_of([1.2, 1.3], [-0.5, -0.5])
    assert gradient(name, tokens, rule) == pytest.approx([0.6, 0.0])
    assert cut(name, tokens, rule) == [False, True]


def test_a_few_stale_tokens_of_a_bad_answer_do_not_make_most_of_the_gradient() -> None:
    """Three tokens of a hundred have become 80 times likelier: without the bound their share of
    the gradient is 71 %."""
    tokens = tokens_of([80.0] * 3 + [1.0] * 97, [-0.5] * 100)
    for name, loss in LOSSES.items():
        if name == "gspo":  # it has one ratio for all of them
            continue
        tokens.logprobs_N.grad = None
        loss.per_token(tokens, LossRule()).loss_N.sum().backward()
        assert tokens.logprobs_N.grad is not None
        size = tokens.logprobs_N.grad.abs()
        assert float(size[:3].sum() / size.sum()) < 0.1, name


def test_dppo_tv_leaves_out_what_moved_too_far_in_probability() -> None:
    # mu = 0.5. pi = 0.75 and 0.65: moved by 0.25 and 0.15; and down to 0.25 and 0.35.
    tokens = tokens_of([1.5, 1.3, 0.5, 0.7], [0.5, 0.5, -0.5, -0.5], recorded=math.log(0.5))
    assert losses_of("dppo_tv", tokens) == pytest.approx([0.0, -0.65, 0.0, 0.35])
    assert cut("dppo_tv", tokens) == [True, False, True, False]
    assert gradient("dppo_tv", tokens) == pytest.approx([0.0, -0.65, 0.0, 0.35])


def test_dppo_tv_cuts_no_token_without_an_advantage() -> None:
    # mu = 0.5; pi = 0.25 and 0.75: both moved by 0.25.
    tokens = tokens_of([0.5, 1.5], [0.0, 0.0], recorded=math.log(0.5))
    assert cut("dppo_tv", tokens) == [False, False]


def test_dppo_tv_lets_a_rare_token_triple() -> None:
    tokens = tokens_of([3.0], [0.5], recorded=math.log(1e-4))
    assert losses_of("dppo_tv", tokens) == pytest.approx([-1.5])
    assert cut("grpo", tokens) == [True]


def test_dppo_tv_pulls_back_by_the_square_of_the_log_ratio() -> None:
    tokens = tokens_of([math.e], [0.0])
    assert losses_of("dppo_tv", tokens, LossRule(tv_kl=0.5)) == pytest.approx([0.5])
    assert gradient("dppo_tv", tokens, LossRule(tv_kl=0.5)) == pytest.approx([1.0])  # 2 * 0.5 * 1


def test_gspo_has_one_ratio_for_an_answer() -> None:
    # Geometric means: sqrt(2 * 0.5) = 1; 1.21 -> clipped to 1.0004 for A > 0.
    tokens = tokens_of([2.0, 0.5, 1.21], [0.5, 0.5, 0.5], answers=[0, 0, 1])
    assert losses_of("gspo", tokens) == pytest.approx([-0.5, -0.5, -0.5002])
    # d/dlogp of one token: each of both losses has 1/2 of its ratio's logarithm.
    assert gradient("gspo", tokens) == pytest.approx([-0.5, -0.5, 0.0])


def test_cispo_weighs_and_leaves_nothing_out() -> None:
    tokens = tokens_of([2.0, 9.0, 9.0], [0.5, 0.5, -0.5])
    assert gradient("cispo", tokens) == pytest.approx([-1.0, -2.5, 1.5])  # weights 2, 5, 3
    assert cut("cispo", tokens) == [False] * 3


def test_ppo_decoupled_clips_around_the_start_of_the_run() -> None:
    # pi / mu = 2, pi_0 / mu = 2: pi / pi_0 = 1, not clipped; the weight pi_0 / mu comes after.
    tokens = tokens_of([2.0], [0.5], start=[2.0])
    assert losses_of("ppo_decoupled", tokens) == pytest.approx([-0.5])
    aim = Objective(loss=LOSSES["ppo_decoupled"], rule=RULE)
    assert aim.sums(tokens).loss.item() == pytest.approx(-1.0)


def expected_gradient(name: str, pi: list[float]) -> list[float]:
    """Gradient of the reward by the three logits, expected over tokens that mu samples.

    mu = (0.5, 0.3, 0.2); rewards 1, 0 and 0.3; the baseline is their mean under mu, 0.56.
    """
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = torch.tensor(pi, dtype=torch.float64).log().requires_grad_()
    aim = Objective(loss=LOSSES[name], rule=RULE)
    tokens = Tokens(
        logprobs_N=torch.log_softmax(logits, -1),
        recorded_N=mu.log(),
        start_N=torch.tensor(pi, dtype=torch.float64).log(),
        # The losses grow with |A|: this is the expectation over mu.
        advantages_N=mu * (torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64) - 0.56),
        answers_N=torch.arange(3),
    )
    (-aim.sums(tokens).loss).backward()
    assert logits.grad is not None
    found: list[float] = logits.grad.tolist()
    return found


@pytest.mark.parametrize("name", LOSSES.keys() - {"gspo"})  # which clips so close to 1
def test_where_nothing_is_cut_the_gradient_is_the_true_one(name: str) -> None:
    """pi_0 / mu counts once. pi (R - E R) with E R = 0.525: 0.45 * 0.475 and so on."""
    found = expected_gradient(name, [0.45, 0.30, 0.25])
    assert found == pytest.approx([0.21375, -0.15750, -0.05625], abs=1e-9)
