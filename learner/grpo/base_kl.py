"""KL divergence of the policy from its base, with the adapter switched off for the base's values.

Forgetting follows this distance (arXiv:2509.04259, "RL's Razor"), so it is measured at every step,
on a few answers. The estimator is k3 = q / p - 1 - log(q / p) for tokens drawn from p, with p the
policy and q the base (Schulman 2020, http://joschu.net/blog/kl-approx.html): it is unbiased for
KL(p || q), since q / p has the mean 1, and never negative. Answers of a run were drawn from the
policy of its start, or from an older one, so its value is exact in the first step of fresh groups
and an estimate after that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from learner.errors import DivergedError, ParentError
from learner.grpo.checks import attempt
from learner.policy.adapter_io import sampled_by
from learner.policy.logprobs import Policy, packs_of
from learner.policy.packing import Pack
from learner.records import Fault, Parent, Silent, TrainingGroup, TrainingJob
from sidecar.records import BASE
from sidecar.visible import counted

SAMPLED_ANSWERS = 8
"""Most answers of a step that are measured, one of a group: two forward passes of 8 rows, beside
the forward and backward passes of all answers."""
MEASURED_TO = 20.0
"""Nats of log(q / p) up to which a measured value is that of k3: exp of more would overflow."""
PULLED_TO = 10.0
"""Nats of log(q / p) above which the term in the loss pulls no harder. A token that the policy lost
by 10 nats weighs as much as 22,000 others, and the policy gives it less than once in 22,000 tokens,
which is more than most steps have: so the bound costs the expectation next to nothing. At 20 nats
one token would weigh 4.9e8: the gradient is scaled down to `MAX_GRAD_NORM`, and nothing of what the
other tokens say would be left of it."""
KL_LIMIT = 10.0
"""Mean nats a token from the base, each token counted up to `MOST_OF_A_TOKEN`, over which a run
fails and publishes nothing. Sound lines were 0.001 to 0.13 away, destroyed policies over 20."""
MOST_OF_A_TOKEN = 100.0
"""nats. The estimator has a heavy tail: one token of 400 that became e^8 times rarer adds 7 nats to
the mean, and a run may unlearn one token. A destroyed policy is far off at many."""


@dataclass(frozen=True, slots=True)
class BaseKl:
    """A measured divergence from the base."""

    nats: float
    """Mean per token."""
    tokens: int
    bounded: float
    """Mean per token, of which none counts more than `MOST_OF_A_TOKEN`: what the limit reads."""


def k3(logprobs_N: Tensor, base_N: Tensor, cut: float = MEASURED_TO) -> Tensor:
    """[N] nats: the estimator's value for each token. logprobs_N, base_N: log p and log q.

    cut: nats of log(q / p) above which value and slope go on along the tangent.

    Its gradient with respect to log p is 1 - q / p: the token's share of that of KL(q || p), which
    draws a policy back where it lost what the base does. Above the cut it stays 1 - exp(cut).
    """
    log_ratio_N = base_N - logprobs_N
    # At the cut itself this has the slope 1 and relu 0, so that one of the two counts. The slope of
    # clamp is 1 there up to torch 2.14, and 0 from 2.15 on.
    near_N = torch.where(log_ratio_N > cut, cut, log_ratio_N)
    return near_N.exp() - 1 - near_N + math.expm1(cut) * torch.relu(log_ratio_N - cut)


def penalty(logprobs_N: Tensor, base_N: Tensor) -> Tensor:
    """[N] nats: `k3` as a term of a loss, whose gradient is bounded by `PULLED_TO`."""
    return k3(logprobs_N, base_N, PULLED_TO)


def base_logprobs(policy: Policy, pack: Pack) -> Tensor:
    """[N] nats of a pack's targets under the base, without gradient."""
    with torch.no_grad(), sampled_by(policy, Parent(name=BASE)):
        return policy.logprobs(pack)[0]


def sample_answers(groups: Sequence[TrainingGroup], turn: int) -> list[TrainingGroup]:
    """Return at most `SAMPLED_ANSWERS` groups with one trainable answer each. Pure.

    The groups are spread over all of them; `turn` moves which answer of a group is taken.
    """
    number = min(SAMPLED_ANSWERS, len(groups))
    chosen: list[TrainingGroup] = []
    for place in range(number):
        group = groups[place * len(groups) // number]
        rows = [row for row in group.rows if row.trainable]
        if rows:
            chosen.append(replace(group, rows=(rows[(turn + place) % len(rows)],)))
    return chosen


def measure_base_kl(
    policy: Policy, groups: Sequence[TrainingGroup], job: TrainingJob, *, turn: int
) -> BaseKl | None:
    """Measure the divergence from the base on a sample of the answers of these groups.

    A group that cannot be computed has no part in it. Returns: None when none can, or the mean is
    no number. Raises: RunStoppedError.
    """
    job = replace(job, watch=Silent())  # it is no pass over the step's groups
    found = job.ranks.each(
        sample_answers(groups, turn),
        lambda group: attempt(group.group_id, job, partial(_values, policy, group, job)),
    )
    job.report("")
    measured = [one for one in found if not isinstance(one, Fault)]
    tokens = sum(len(values) for values in measured)
    mean = sum(map(sum, measured)) / tokens if tokens else float("nan")
    if not abs(mean) < float("inf"):
        return None
    cut = sum(min(value, MOST_OF_A_TOKEN) for values in measured for value in values)
    return BaseKl(mean, tokens, cut / tokens)


def require_near(away: BaseKl | None, job: TrainingJob, *, steps: int) -> None:
    """Stop a run whose policy is further from the base than any sound one, or gives no numbers.

    steps: optimiser steps that it took.
    Raises: DivergedError; ParentError when the parent was that far before the first step.
    """
    limit = KL_LIMIT
    if away is None:
        if not steps:  # the check told already what cannot be computed
            return
        found = "broken: its log-probabilities are no numbers"
    elif away.bounded <= limit:
        return
    else:
        found = f"{away.bounded:.3g} nats a token from the base, over the limit of {limit:g}"
    if not steps and job.parent.path is not None:
        raise ParentError(
            f"parent {job.parent.name} is {found}; roll back to a version that is nearer"
        )
    raise DivergedError(
        f"after {counted(steps, 'step')} the policy is {found}: it is not published; lower "
        "learner.learning_rate"
    )


def _values(policy: Policy, group: TrainingGroup, job: TrainingJob) -> list[float]:
    packs = packs_of(policy, group, job.settings.pack_tokens)
    with torch.no_grad():
        found = [k3(policy.logprobs(pack)[0], base_logprobs(policy, pack)) for pack in packs]
    # A token of probability 0 is as far off as a number can say, and no reason not to measure.
    values: list[float] = torch.cat(found).clamp(max=torch.finfo(torch.float32).max).tolist()
    return values
