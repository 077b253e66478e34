"""The objective of a step: a loss, its corrections, its mean, and its statistics. Pure.

The settings name a loss. A pack gives sums; dividing them by the step's denominator gives the mean
over all its answers or tokens, however they are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.grpo.corrections import CorrectionRule, stale_answers, weights
from learner.grpo.losses import LOSSES, LossRule, NamedLoss, Tokens, ratio
from learner.policy.packing import Pack
from sidecar.settings import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSums:
    """Sums over the N tokens of a pack. Only `loss` carries a gradient."""

    loss: Tensor
    """Scalar, before the division by the step's denominator."""
    ratio: float
    """Sum of pi / mu."""
    clipped: int
    """Tokens whose gradient the loss or a mask removes."""
    kl: float
    """Sum of r - 1 - log r, nats: KL(behaviour || policy) by Schulman's k3 estimator."""
    drift: float
    """Sum of |recorded - policy|, nats."""
    stale: int = 0
    """Answers that the mask of stale negatives leaves without a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with its constants."""

    loss: NamedLoss
    rule: LossRule
    correction: CorrectionRule
    geometric_limit: float = 0.0
    """Largest distance of an answer's mean pi_0 / mu from 1, by which answers are left out before
    the first step (`learner.grpo.answers.leave_out_far`); 0: none. SkyRL uses 0.01."""

    @property
    def uses_start(self) -> bool:
        """True: the run needs the log-probabilities of the policy at its start."""
        return bool(self.loss.from_start or self.correction.tis_cap or self.geometric_limit)

    def denominator(self, packs: Sequence[Pack]) -> float:
        """Return what the sums of these packs, which are a whole step, are divided by."""
        if self.loss.mean == "token":
            return float(sum(len(pack.targets) for pack in packs))
        answers = float(sum(max(pack.answers) + 1 for pack in packs))
        return answers * self.rule.length if self.loss.mean == "length" else answers

    def sums(self, tokens: Tokens) -> PackSums:
        """Compute the loss of a pack's tokens."""
        of_loss = tokens
        if self.correction.tis_cap:
            # The weight holds pi_0 / mu: the ratio of the loss is pi / pi_0, or it counted twice.
            of_loss = replace(tokens, recorded_N=tokens.start_N)
        found = self.loss.per_token(of_loss, self.rule)
        weights_N = weights(tokens, self.correction, from_start=self.loss.from_start)
        shares_N = (
            1 / tokens.lengths_A[tokens.answers_N]
            if self.loss.mean == "answer"
            else torch.ones_like(weights_N)
        )
        with torch.no_grad():
            r_N = ratio(tokens.logprobs_N, tokens.recorded_N)
            moved_N = tokens.logprobs_N - tokens.recorded_N
            kl_N = r_N - 1 - moved_N
        return PackSums(
            loss=(weights_N * shares_N * found.loss_N).sum(),
            ratio=float(r_N.sum()),
            clipped=int((found.cut_N | (weights_N == 0)).sum()),
            kl=float(kl_N.sum()),
            drift=float(moved_N.abs().sum()),
            stale=stale_answers(tokens, self.correction.stale_limit),
        )


def tokens_of(pack: Pack, logprobs_N: Tensor) -> Tokens:
    """Return a pack's targets as the losses take them, on the device of their log-probabilities.

    logprobs_N: [N] nats, under the policy.
    """
    device = logprobs_N.device
    return Tokens(
        logprobs_N=logprobs_N,
        recorded_N=torch.tensor(pack.recorded, device=device),
        start_N=torch.tensor(pack.start, device=device),
        advantages_N=torch.tensor(pack.advantages, device=device),
        answers_N=torch.tensor(pack.answers, device=device),
    )


def objective(settings: Learner) -> Objective:
    """Return the objective that the settings name."""
    return Objective(
        loss=LOSSES[settings.loss],
        rule=LossRule(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            tv_limit=settings.tv_limit,
            negative_bound=settings.negative_bound,
            length=settings.loss_length,
        ),
        correction=CorrectionRule(tis_cap=settings.tis_cap, stale_limit=settings.stale_limit),
        geometric_limit=settings.geometric_limit,
    )
