"""Corrections for answers that another policy sampled: weights and masks of their tokens. Pure.

Each returns [N] weights without gradient, 1 where it changes nothing. The loss of a token is
multiplied by their product. Symbols as in `learner.grpo.losses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.grpo.losses import Tokens, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionRule:
    """Limits of the corrections; 0 switches one off."""

    tis_cap: float = 0.0
    """Truncated importance sampling: the largest weight; verl, SkyRL and OpenRLHF use 2. The ratio
    of the loss is then pi / pi_0 (`learner.grpo.objective`)."""
    stale_limit: float = 0.0
    """Mask of stale negatives: most nats a token, mean(log mu - log pi); slime offers 1e-4."""


def weights(tokens: Tokens, rule: CorrectionRule, *, from_start: bool = False) -> Tensor:
    """[N]: the product of the corrections that are switched on.

    from_start: the loss has pi / pi_0 as its ratio, so pi_0 / mu is a factor also without a cap.
    """
    found_N = torch.ones_like(tokens.recorded_N)
    if rule.tis_cap or from_start:
        found_N = found_N * truncated_weight(tokens, rule.tis_cap or math.inf)
    if rule.stale_limit:
        found_N = found_N * stale_negative_mask(tokens, rule.stale_limit)
    return found_N


def truncated_weight(tokens: Tokens, cap: float) -> Tensor:
    """[N]: min(pi_0 / mu, cap) for each token, for a loss whose ratio is pi / pi_0.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (2025); verl's `rollout_is`, level token.
    """
    return ratio(tokens.start_N, tokens.recorded_N).clamp(max=cap).detach()


def stale_negative_mask(tokens: Tokens, limit: float) -> Tensor:
    """[N]: 0 for all tokens of an answer with A < 0 that the policy has left behind, else 1.

    Left behind: mean over its tokens of (log mu - log pi) > limit, in nats.
    Source: DeepSeek-V3.2, arXiv:2512.02556. TRL: `off_policy_mask_threshold`.
    """
    behind_N = tokens.answer_mean(tokens.recorded_N - tokens.logprobs_N.detach())
    return (~((tokens.advantages_N < 0) & (behind_N > limit))).to(behind_N.dtype)


def stale_answers(tokens: Tokens, limit: float) -> int:
    """Count the answers of a pack that `stale_negative_mask` masks; 0 where it is off."""
    if not limit:
        return 0
    return len(tokens.answers_N[stale_negative_mask(tokens, limit) == 0].unique())
