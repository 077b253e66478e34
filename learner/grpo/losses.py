"""Policy-gradient losses on flat token tensors. Pure.

A loss takes the N trainable tokens of a pack, without prompts and masked answers. It returns sums,
and the caller divides by the number of trainable tokens of the whole optimiser step, so the loss
does not depend on how the step is split into packs. Shapes end in _N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Sums over N tokens. Only `loss_sum` carries a gradient."""

    loss_sum: Tensor
    """Scalar."""
    ratio_sum: float
    clipped: int
    """Number of tokens whose gradient the clip removes."""
    kl_sum: float
    """Sum of r - 1 - log r, nats: KL(behaviour || policy) by Schulman's k3 estimator."""


Loss = Callable[[Tensor, Tensor, Tensor, ClipRange], TokenLoss]


def grpo(
    logprobs_N: Tensor, recorded_N: Tensor, advantages_N: Tensor, clip: ClipRange
) -> TokenLoss:
    """Clipped surrogate: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - recorded).

    logprobs_N: nats, under the policy, with gradient.
    recorded_N: nats, under the behaviour policy (recorded by vLLM), so r is exact for answers of
        any age.
    advantages_N: score units, one per token of the answer it belongs to.
    Source: PPO, arXiv:1707.06347; group baseline, arXiv:2402.03300; a higher upper clip and the
        token mean over the batch, DAPO, arXiv:2503.14476.
    """
    log_ratio_N = logprobs_N - recorded_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        cut_N = clipped_N * advantages_N < ratio_N * advantages_N
        kl_N = ratio_N - 1 - log_ratio_N
    return TokenLoss(
        loss_sum=loss_N.sum(),
        ratio_sum=float(ratio_N.detach().sum()),
        clipped=int(cut_N.sum()),
        kl_sum=float(kl_N.sum()),
    )


LOSSES: Mapping[str, Loss] = {"grpo": grpo}
"""Losses by the name that the lineage records."""
