"""Policy-gradient losses on flat token tensors. Pure.

A loss takes the N trainable tokens of a pack, without prompts and masked answers, and returns one
value for each token. `pack_loss` weighs them and returns sums; the caller divides by the
denominator of the whole optimiser step, so the loss does not depend on how a step is split into
packs. An answer is never split over two packs, so a loss may use its tokens together.

Conventions. mu: the behaviour policy, whose log-probabilities vLLM recorded. pi: the policy.
pi_0: the policy at the start of the run. r = pi / mu, so r is exact for answers of any age.
A: the advantage. sg: no gradient. Shapes end in _N (tokens) or _A (answers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.policy.packing import Pack
from sidecar.settings import Learner

Mean = Literal["token", "answer", "length"]
"""What a step's loss is the mean of. `token`: all trainable tokens of the step alike. `answer`: the
mean over the tokens of each answer, then over the answers. `length`: the sum over the tokens of an
answer, divided by a constant length, then the mean over the answers."""
LOSS_LENGTH = 256
"""Tokens that `dr_grpo` divides the sum of an answer by."""
MAX_LOG_RATIO = 60.0
"""nats; exp(60) is finite in fp32, exp(89) is not. A ratio beyond it has no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """Constants of the losses. Each loss reads those that its docstring names."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    """The ratio is clipped at 1 minus and 1 plus these. Source: DAPO, arXiv:2503.14476."""
    tv_limit: float = 0.2
    """Difference of probabilities. Source: prime-rl's default."""
    tv_kl: float = 1e-3
    """Weight of the squared log-ratio. Source: prime-rl's default."""
    cispo_max: float = 5.0
    """Largest ratio. Source: ART's and AReaL's 0 to 5."""
    gspo_low: float = 3e-4
    gspo_high: float = 4e-4
    """Source: the experiments of the GSPO paper, arXiv:2507.18071."""
    negative_bound: float = 3.0
    """Largest ratio of a token with a negative advantage, of which a few stale ones would otherwise
    make most of the gradient; a loss that clips takes 1 + `clip_high` where that is larger. Source:
    verl's dual clip, c = 3, after arXiv:1912.09729."""
    length: int = LOSS_LENGTH
    """Tokens that `dr_grpo` divides an answer's sum by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The N trainable tokens of a pack."""

    logprobs_N: Tensor
    """nats, under pi, with gradient."""
    recorded_N: Tensor
    """nats, under mu."""
    start_N: Tensor
    """nats, under pi_0."""
    advantages_N: Tensor
    """Score units; the same for all tokens of an answer."""
    answers_N: Tensor
    """int64, 0..A-1: the answer that a token belongs to."""

    @property
    def lengths_A(self) -> Tensor:
        """Number of tokens of each answer, as a float tensor."""
        return torch.bincount(self.answers_N).to(self.logprobs_N.dtype)

    @property
    def since_start(self) -> list[float]:
        """[A] sum of pi / pi_0 - 1 over the tokens of each answer: how much likelier they became
        since the start of the run. Its mean is 0 over what pi_0 says, whatever the prompt."""
        moved_N = ratio(self.logprobs_N.detach(), self.start_N) - 1
        sums_A = torch.zeros_like(self.lengths_A).index_add(0, self.answers_N, moved_N)
        return [float(one) for one in sums_A.tolist()]

    def answer_mean(self, values_N: Tensor) -> Tensor:
        """[N]: for each token the mean of the values over its answer."""
        sums_A = torch.zeros_like(self.lengths_A).index_add(0, self.answers_N, values_N)
        return (sums_A / self.lengths_A)[self.answers_N]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of each token, before the mean."""

    loss_N: Tensor
    cut_N: Tensor
    """bool: the rule removes the gradient of this token."""


Loss = Callable[[Tokens, LossRule], TokenLoss]


def ratio(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """[N]: exp(logprob - reference), bounded so that it is finite in fp32."""
    return (logprobs_N - reference_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def dppo_tv(tokens: Tokens, rule: LossRule) -> TokenLoss:
    """Trust region in probabilities: -r A, without tokens that moved too far; plus a small pull.

    A token is left out when A > 0 and pi - mu > tv_limit, or A < 0 and pi - mu < -tv_limit. The
    pull is tv_kl (log r)^2, for every token. A rare token may double its probability, which a clip
    of ratios forbids, and a frequent one may not fall far, which such a clip allows. The ratio of a
    token with A < 0 is bounded by `negative_bound`.
    Source: arXiv:2602.04879; prime-rl's default loss, which has no `negative_bound`.
    """
    r_N = ratio(tokens.logprobs_N, tokens.recorded_N)
    moved_N = (tokens.logprobs_N.exp() - tokens.recorded_N.exp()).detach()
    a_N = tokens.advantages_N
    over_N = torch.where(a_N > 0, moved_N > rule.tv_limit, (a_N < 0) & (moved_N < -rule.tv_limit))
    bounded_N = torch.where(_beyond(r_N, a_N, rule.negative_bound), rule.negative_bound, r_N)
    pull_N = (tokens.logprobs_N - tokens.recorded_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) ** 2
    loss_N = torch.where(over_N, 0.0, -bounded_N * a_N) + rule.tv_kl * pull_N
    return TokenLoss(loss_N=loss_N, cut_N=over_N | _beyond(r_N, a_N, rule.negative_bound))


def clipped(tokens: Tokens, rule: LossRule) -> TokenLoss:
    """The clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    The ratio of a token with A < 0 is bounded by `negative_bound`, or by 1 + clip_high where that
    is larger. `grpo`, `dr_grpo` and `dapo` share it and differ in the mean.
    Source: PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300; a higher upper clip, DAPO,
    arXiv:2503.14476; the bound, arXiv:1912.09729. TRL: `epsilon`, `epsilon_high`, `delta`.
    """
    return _clipped(ratio(tokens.logprobs_N, tokens.recorded_N), tokens.advantages_N, rule)


def gspo(tokens: Tokens, rule: LossRule) -> TokenLoss:
    """The clipped surrogate with one ratio for each answer: exp(mean over its tokens of log r).

    It is clipped to [1 - gspo_low, 1 + gspo_high].
    Source: arXiv:2507.18071. TRL: `importance_sampling_level="sequence"`.
    """
    log_ratio_N = tokens.answer_mean(tokens.logprobs_N - tokens.recorded_N)
    r_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _clip(r_N, tokens.advantages_N, low=rule.gspo_low, high=rule.gspo_high, rule=rule)


def cispo(tokens: Tokens, rule: LossRule) -> TokenLoss:
    """REINFORCE with a bounded weight: -sg(min(r, cispo_max)) A log pi. It leaves no token out.

    Of a token with A < 0 the weight is at most `negative_bound`.
    Source: MiniMax-M1, arXiv:2506.13585. TRL: `epsilon_high` is `cispo_max`, without the bound.
    """
    a_N = tokens.advantages_N
    most_N = torch.where(a_N < 0, min(rule.cispo_max, rule.negative_bound), rule.cispo_max)
    weight_N = torch.minimum(ratio(tokens.logprobs_N.detach(), tokens.recorded_N), most_N)
    loss_N = -weight_N * a_N * tokens.logprobs_N
    return TokenLoss(loss_N=loss_N, cut_N=torch.zeros_like(a_N, dtype=torch.bool))


def ppo_decoupled(tokens: Tokens, rule: LossRule) -> TokenLoss:
    """The clipped surrogate around pi_0: pi / pi_0 in the place of r.

    The step multiplies it by pi_0 / mu, so that together they are exact for answers of any age.
    Source: arXiv:2110.00641; AReaL, arXiv:2505.24298.
    """
    return _clipped(ratio(tokens.logprobs_N, tokens.start_N), tokens.advantages_N, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """A loss and the mean that belongs to it."""

    per_token: Loss
    mean: Mean
    from_start: bool = False
    """True: its ratio is pi / pi_0, so that pi_0 / mu is always part of the weight."""


LOSSES: Mapping[str, NamedLoss] = {
    "dppo_tv": NamedLoss(per_token=dppo_tv, mean="token"),
    "grpo": NamedLoss(per_token=clipped, mean="answer"),
    "dr_grpo": NamedLoss(per_token=clipped, mean="length"),
    "dapo": NamedLoss(per_token=clipped, mean="token"),
    "gspo": NamedLoss(per_token=gspo, mean="answer"),
    "cispo": NamedLoss(per_token=cispo, mean="token"),
    "ppo_decoupled": NamedLoss(per_token=ppo_decoupled, mean="token", from_start=True),
}
"""Losses by the name that `learner.loss` and the lineage give."""


def _clipped(r_N: Tensor, a_N: Tensor, rule: LossRule) -> TokenLoss:
    return _clip(r_N, a_N, low=rule.clip_low, high=rule.clip_high, rule=rule)


def _clip(r_N: Tensor, a_N: Tensor, *, low: float, high: float, rule: LossRule) -> TokenLoss:
    clipped_N = r_N.clamp(1 - low, 1 + high)
    bounded_N = torch.where(_beyond(r_N, a_N, rule.negative_bound), rule.negative_bound, r_N)
    loss_N = -torch.minimum(bounded_N * a_N, clipped_N * a_N)
    cut_N = (clipped_N * a_N < r_N * a_N).detach()
    # A bad token has the larger of both ratios, so a bound within the clip works from there on.
    bound = max(rule.negative_bound, 1 + high)
    return TokenLoss(loss_N=loss_N, cut_N=cut_N | _beyond(r_N, a_N, bound))


def _beyond(r_N: Tensor, a_N: Tensor, bound: float) -> Tensor:
    # At the bound itself the gradient is whole: clamp has none there from torch 2.15 on.
    return (a_N < 0) & (r_N.detach() > bound)


# The objective of a step: a loss, its mean, and its statistics. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSums:
    """Sums over the N tokens of a pack. Only `loss` carries a gradient."""

    loss: Tensor
    """Scalar, before the division by the step's denominator."""
    ratio: float
    """Sum of pi / mu."""
    clipped: int
    """Tokens whose gradient the loss removes."""
    kl: float
    """Sum of r - 1 - log r, nats: KL(behaviour || policy) by Schulman's k3 estimator."""
    drift: float
    """Sum of |recorded - policy|, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with its constants."""

    loss: NamedLoss
    rule: LossRule

    @property
    def uses_start(self) -> bool:
        """True: the run needs the log-probabilities of the policy at its start."""
        return self.loss.from_start

    def denominator(self, packs: Sequence[Pack]) -> float:
        """Return what the sums of these packs, which are a whole step, are divided by."""
        if self.loss.mean == "token":
            return float(sum(len(pack.targets) for pack in packs))
        answers = float(sum(max(pack.answers) + 1 for pack in packs))
        return answers * self.rule.length if self.loss.mean == "length" else answers

    def sums(self, tokens: Tokens) -> PackSums:
        """Compute the loss of a pack's tokens."""
        found = self.loss.per_token(tokens, self.rule)
        weights_N = torch.ones_like(tokens.recorded_N)
        if self.loss.from_start:  # its ratio is pi / pi_0
            weights_N = ratio(tokens.start_N, tokens.recorded_N).detach()
        if self.loss.mean == "answer":
            weights_N = weights_N / tokens.lengths_A[tokens.answers_N]
        with torch.no_grad():
            r_N = ratio(tokens.logprobs_N, tokens.recorded_N)
            moved_N = tokens.logprobs_N - tokens.recorded_N
            kl_N = r_N - 1 - moved_N
            told = (r_N.sum(), found.cut_N.sum(), kl_N.sum(), moved_N.abs().sum())
            r, cut, kl, drift = torch.stack(told).tolist()  # a card is waited for once
        return PackSums(
            loss=(weights_N * found.loss_N).sum(), ratio=r, clipped=int(cut), kl=kl, drift=drift
        )


def tokens_of(pack: Pack, logprobs_N: Tensor) -> Tokens:
    """Return a pack's targets as the losses take them. logprobs_N: [N] nats, under the policy."""
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
    return Objective(loss=LOSSES[settings.loss], rule=LossRule(length=LOSS_LENGTH))
