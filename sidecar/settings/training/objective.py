"""The learner's settings for what a step minimises and how far it moves the weights."""

from __future__ import annotations

from typing import Annotated, Literal

from sidecar.settings.kinds import Between
from sidecar.settings.section import Section


class ObjectiveSection(Section):
    """Loss, advantages, corrections and update. A part of `[learner]`."""

    loss: Literal["dppo_tv", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo_decoupled"] = (
        "dppo_tv"
    )
    """Loss of a step; formulas and sources: docs/losses.md."""
    advantage: Literal["mean", "leave_one_out", "std", "rank"] = "mean"
    """How the rewards of a group become advantages; docs/losses.md."""
    learning_rate: Annotated[
        float, Between(0, 1, "at 0 nothing is learned, beyond 1 all is lost", above_low=True)
    ] = 1e-3
    """The optimiser's rate: what a weight moves in one step if all groups of the step agree and
    differ by at least `reference_spread`; less otherwise. The default was measured on a 135M model;
    use less on larger ones: 1e-5 to 1e-4 is usual at 7 to 8 billion parameters."""
    reference_spread: Annotated[
        float, Between(0, 10, "it divides the spread of a group", above_low=True)
    ] = 0.25
    """Spread of a group's scores above which the update no longer grows with it."""
    warmup_steps: Annotated[int, Between(0, 10_000, "0 starts with the whole rate")] = 2
    """Steps over which the rate rises: step k after the base trains at
    `learning_rate * k / (warmup_steps + 1)`, over as many runs as it takes."""
    warmup: Annotated[int, Between(0, 1_000, "0 takes none")] = 0
    """Supervised steps on the best answer of each group, before the first step of a run that starts
    from the base."""
    max_grad_norm: Annotated[
        float, Between(0, 1_000_000, "at 0 no gradient is left", above_low=True)
    ] = 1.0
    """A gradient with a larger norm is scaled down to it, and the update with it."""
    tv_limit: Annotated[
        float, Between(0, 1, "it limits a difference of probabilities", above_low=True)
    ] = 0.2
    """`dppo_tv` leaves out a token whose probability moved further than this in the direction of
    its advantage."""
    clip_low: Annotated[
        float,
        Between(0, 1, "the ratio is clipped below 1 minus this", above_low=True, below_high=True),
    ] = 0.2
    """`grpo`, `dr_grpo`, `dapo`, `ppo_decoupled`: the importance ratio is clipped below 1 minus
    this."""
    clip_high: Annotated[
        float, Between(0, 10, "the ratio is clipped above 1 plus this", above_low=True)
    ] = 0.28
    """... and above 1 plus this."""
    negative_bound: Annotated[float, Between(1, 1_000, "it bounds a ratio, which starts at 1")] = (
        3.0
    )
    """Bounds the ratio of tokens of bad answers, of which a few stale ones would otherwise make
    most of the gradient. A loss that clips takes 1 + `clip_high` where that is larger."""
    tis_cap: Annotated[float, Between(0, 1_000, "0 switches it off")] = 0.0
    """Above 0: a token's loss is multiplied by min(p / q, this), with p its probability at the
    start of the run and q the recorded one, and its ratio is against p. Other trainers use 2."""
    geometric_limit: Annotated[float, Between(0, 1, "0 switches it off")] = 0.0
    """Above 0: an answer is left out of a run when the geometric mean of p / q is further than this
    from 1. SkyRL uses 0.01."""
    stale_limit: Annotated[float, Between(0, 100, "0 switches it off")] = 0.0
    """Above 0: a bad answer is left out of a step when its tokens became less likely by more than
    this, in nats a token."""
    loss_length: Annotated[int, Between(1, 10_000_000, "it divides a sum of tokens")] = 256
    """Tokens that `dr_grpo` divides the sum of an answer by."""
    kl_budget: Annotated[float, Between(0, 100, "0 lets any divergence from the base count")] = 0.2
    """Divergence of the policy from the base, in nats a token, above which `kl_coef` works. It is
    measured at each step on a few answers."""
    kl_coef: Annotated[float, Between(0, 10, "0 only measures")] = 0.0
    """Weight of the divergence from the base in the loss of a step that is over `kl_budget`."""
    kl_limit: Annotated[float, Between(0, 1_000, "0 sets no limit")] = 10.0
    """A run whose policy is further from the base than this (mean nats a token, each token counted
    up to 100) fails and publishes nothing. Sound lines were 0.001 to 0.13 away, destroyed policies
    over 20."""
