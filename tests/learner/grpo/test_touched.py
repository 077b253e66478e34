"""A mask of the server shows as one difference for every token of a place, and what hides is small.

The expectations are computed over all tokens of a place, so nothing here is a matter of luck.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from learner.grpo.answers import untouched

V = 12


def place(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a place, and advantages that depend on the token."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(V, generator=generator), torch.rand(V, generator=generator) - 0.5


def masked(logits_V: Tensor, forbidden: list[int]) -> Tensor:
    """[V] log-probabilities behind the mask, -inf where it forbids."""
    return logits_V.index_fill(0, torch.tensor(forbidden, dtype=torch.long), -math.inf).log_softmax(
        -1
    )


def test_no_difference_above_the_tolerance_is_untouched_and_a_negative_one_is() -> None:
    nan = math.nan

    assert untouched([0.0, 0.2, 0.21, -3.0, nan], 0.2) == (True, True, False, True, True)
    assert untouched([], 0.2) == ()


@pytest.mark.parametrize("seed", range(5))
def test_all_tokens_that_a_mask_allows_differ_by_the_same(seed: int) -> None:
    """So keeping what differs by less than the tolerance is a choice of places, not of tokens."""
    logits_V, _ = place(seed)
    forbidden = [0, 3, 7]
    mu_V, pi_V = masked(logits_V, forbidden), logits_V.log_softmax(-1)
    allowed = [token for token in range(V) if token not in forbidden]

    differences = (mu_V - pi_V)[allowed]

    lost = float(pi_V.exp()[forbidden].sum())
    assert differences.tolist() == pytest.approx([-math.log(1 - lost)] * len(allowed), abs=1e-5)
    assert len({untouched([one], 0.2) for one in differences.tolist()}) == 1


def test_a_bias_differs_from_token_to_token_so_that_equal_ones_are_a_choice_of_tokens() -> None:
    """Why `logit_bias` is not among the masks: the token that it raises is always left out."""
    logits_V, _ = place(0)
    bias_V = torch.zeros(V)
    bias_V[int(logits_V.argmin())] = 3.0
    differences = (logits_V + bias_V).log_softmax(-1) - logits_V.log_softmax(-1)

    assert len({untouched([one], 0.2) for one in differences.tolist()}) == 2


def gradients(logits_V: Tensor, advantages_V: Tensor, forbidden: list[int]) -> tuple[Tensor, ...]:
    """[V] gradients by the logits: what the learner expects to compute at this place, with the
    ratio pi / mu, and that of the reward that the served, masked policy earns."""
    logits_V = logits_V.clone().requires_grad_()
    allowed = [token for token in range(V) if token not in forbidden]
    pi_S, mu_S = logits_V.log_softmax(-1)[allowed], masked(logits_V, forbidden)[allowed]
    advantages_S, recorded_S = advantages_V[allowed], mu_S.detach()
    ours = (recorded_S.exp() * (pi_S - recorded_S).exp() * advantages_S).sum()
    (found,) = torch.autograd.grad(ours, logits_V, retain_graph=True)
    (exact,) = torch.autograd.grad((mu_S.exp() * advantages_S).sum(), logits_V)
    return found, exact


def test_where_nothing_was_forbidden_the_gradient_is_that_of_the_served_policy() -> None:
    for seed in range(10):
        found, exact = gradients(*place(seed), [])
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=0)
        assert exact.norm() > 1e-3


def test_what_hides_below_the_tolerance_bends_the_gradient_by_no_more_than_the_bound() -> None:
    """2 sqrt(2) max|A| sinh(d), with d the difference that the mask makes; docs/losses.md."""
    used = []
    for seed in range(300):
        logits_V, advantages_V = place(seed)
        order = logits_V.argsort().tolist()
        forbidden = order[: 1 + seed % 8]
        lost = float(logits_V.softmax(-1)[forbidden].sum())
        hidden = -math.log(1 - lost)
        if hidden > 0.2:
            continue
        found, exact = gradients(logits_V, advantages_V, forbidden)
        bound = 2 * math.sqrt(2) * float(advantages_V.abs().max()) * math.sinh(hidden)
        used.append(float((found - exact).norm()) / bound)

    assert len(used) > 100
    assert max(used) <= 1
    assert max(used) > 0.1, "a bound that is far away says nothing"
