"""Adam on the sum of a step's gradients, whose rate follows how much the groups' scores tell.

Adam divides the mean of the gradients by the root of the mean of their squares, so that a weight
moves by about the learning rate whatever the advantages were. So each step has a rate of its own:

    rate * sum of min(1, s_i / r_i) / (n + k)
                            s_i: signal of group i: root mean square of its advantages, less what
                            cancels between its answers (`signal`)
                            r_i: `REFERENCE_SPREAD`; less for groups that all spread less, where
                            their judge's noise is known (`learner.runs.selection`)
                            n: groups of the step. k: groups that were left out because their
                            answers differ by no more than noise

Below the reference, advantages times c move the policy by c times as much; groups that say nothing
move it by nothing.
Without it advantages times 0.001 gave 87 % of an update.

Both moments begin anew with each run, and there is no warm-up. On a toy (docs/log.md, 2026-11-28)
moments that go on from run to run gained 0.02 to 0.04 more, and a second moment made of the groups'
own squares nothing. A coordinate moves by at most the rate in the first step, later by at most the
root of the sum over the run's steps of (weight in m)^2 / (weight in v): 1.01 times the rate in 4
steps, 1.05 in 12, 2.35 in endless ones (by Cauchy and Schwarz).
Source of Adam: arXiv:1412.6980. No weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from learner.errors import NonFiniteError
from learner.grpo.advantages import REFERENCE_SPREAD
from learner.ranks import Ranks
from learner.records import TrainableRow, TrainingGroup, TrainingJob

MAX_GRAD_NORM = 1.0
"""A gradient with a larger L2 norm is scaled down to it."""
BETAS = (0.9, 0.99)
"""A run has few steps, so the second moment must adapt faster than with 0.999."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of a run after some of its steps, for what goes on with it after a kill."""

    steps: int
    first: Mapping[str, Tensor]
    """Parameter name -> running mean of the gradient."""
    second: Mapping[str, Tensor]
    """Parameter name -> running mean of its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Sizes of one step."""

    grad_norm: float
    """L2 norm of the gradient before it was scaled down."""
    update_norm: float
    """L2 norm of the change of the weights."""
    rate: float
    """Of this step, by the signals of its groups."""


class SignalAdamW:
    """Takes the groups of a step, then changes the parameters in place.

    The gradients of a step's groups add up in the parameters.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], rate: float, moments: Moments | None = None
    ) -> None:
        """moments: of this run; None where it begins."""
        self._parameters, self._rate = parameters, rate
        self._adam = torch.optim.AdamW(
            parameters.values(), lr=rate, betas=BETAS, eps=1e-8, weight_decay=0.0
        )
        for name, parameter in parameters.items():
            if moments is not None:
                self._adam.state[parameter] = {
                    "step": torch.tensor(float(moments.steps)),
                    "exp_avg": moments.first[name].to(parameter.device),
                    "exp_avg_sq": moments.second[name].to(parameter.device),
                }
        self._steps = 0 if moments is None else moments.steps
        self.forget()

    @property
    def moments(self) -> Moments:
        """Those after the last step. They change with the next one: write them at once."""
        state = self._adam.state
        return Moments(
            steps=self._steps,
            first={n: state[one]["exp_avg"] for n, one in self._parameters.items() if one in state},
            second={
                n: state[one]["exp_avg_sq"] for n, one in self._parameters.items() if one in state
            },
        )

    @property
    def gradient(self) -> Mapping[str, Tensor]:
        """Sum of the gradients of the groups since the last step."""
        for one in self._parameters.values():
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        return {name: one.grad for name, one in self._parameters.items() if one.grad is not None}

    def forget(self) -> None:
        """Drop the groups and gradients since the last step."""
        self._full, self._counted = 0.0, 0.0
        self._adam.zero_grad()

    def add_group(self, share: float) -> None:
        """Count a group, whose gradient the parameters have. share: as of `rate_share`."""
        self._full += share
        self._counted += 1.0

    def add_ranks(self, ranks: Ranks) -> None:
        """Add up the groups of all processes, each of which took its own: all then step alike."""
        counts = torch.tensor([self._full, self._counted], dtype=torch.float64)
        ranks.add([*self.gradient.values(), counts])
        self._full, self._counted = counts.tolist()

    def add_quiet(self, groups: float) -> None:
        """Count groups without a signal in this step; a part of one where steps share them."""
        self._counted += groups

    def step(self) -> Update:
        """Change the parameters by the groups that were added since the last step.

        Raises: NonFiniteError, before anything is changed.
        """
        gradient = self.gradient
        norm = _norm(list(gradient.values()))
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}")
        if norm > MAX_GRAD_NORM:
            torch._foreach_mul_(list(gradient.values()), MAX_GRAD_NORM / norm)
        rate = self._rate * self._full / self._counted if self._counted else 0.0
        self._adam.param_groups[0]["lr"] = rate
        now = [one.detach() for one in self._parameters.values()]
        before = [one.clone() for one in now]
        self._adam.step()
        self._steps += 1
        self.forget()
        moved = _norm(torch._foreach_sub(now, before))
        return Update(grad_norm=norm, update_norm=moved, rate=rate)


def _norm(tensors: list[Tensor] | tuple[Tensor, ...]) -> float:
    """Return the L2 norm of all of them, summed in fp64; on a card it waits once."""
    norms = torch._foreach_norm(tensors, 2.0, torch.float64)
    return float(torch.linalg.vector_norm(torch.stack(norms)))


# How much a group has to tell: its advantages, less what cancels between answers alike. Pure.

LEAST_LEFT = 1e-4
"""Part of a gradient that does not cancel, under which it is taken for nothing: rounding leaves
about 1e-7 (docs/log.md, 2026-11-24), and the pull of the loss does not shrink with it."""


@dataclass(slots=True)
class _Place:
    advantage: float = 0.0
    squares: float = 0.0
    width: float = 0.0
    rows: int = 0


def rate_share(group: TrainingGroup, job: TrainingJob) -> float:
    """Return how much of the rate a group has, 0 to 1: in proportion to its signal."""
    reference = job.references.get(group.group_id, REFERENCE_SPREAD)
    return min(1.0, signal(unweighted(group)) / reference)


def unweighted(group: TrainingGroup) -> Sequence[TrainableRow]:
    """Return the rows of a group with advantages as they were before sessions got their weights:
    those make sessions count alike, and are no signal."""
    if not group.weights:
        return group.rows
    rows = zip(group.rows, group.weights, strict=True)
    return [replace(row, advantage=row.advantage / weight) for row, weight in rows]


def signal(rows: Sequence[TrainableRow]) -> float:
    """Return the signal of a group, in units of its advantages; 0 where all of it cancels.

    rows: its answers; those that are not trainable have no part.
    """
    rows = [row for row in rows if row.trainable]
    tokens = sum(row.kept_tokens for row in rows)
    if not tokens:
        return 0.0
    square = math.fsum(row.kept_tokens * row.advantage**2 for row in rows) / tokens
    left = uncancelled(rows)
    return math.sqrt(square) * left if left >= LEAST_LEFT else 0.0


def uncancelled(rows: Sequence[TrainableRow]) -> float:
    """Return the part of the gradient that does not cancel between these answers, 0 to 1."""
    left, whole = 0.0, 0.0
    for place in _places(rows):
        width = place.width / place.rows
        # fsum of equal and opposite advantages may leave the last bit; it is no signal.
        summed = 0.0 if place.advantage**2 < 1e-24 * place.squares else place.advantage
        left += (width * summed) ** 2
        whole += width**2 * place.squares
    return min(1.0, math.sqrt(left / whole)) if whole > 0 else 0.0


def _places(rows: Sequence[TrainableRow]) -> list[_Place]:
    numbers: dict[tuple[object, int], int] = {}
    places: dict[int, _Place] = {}
    for row in rows:
        at: object = ("temperature", row.temperature)  # the same text is two at two temperatures
        kept = row.kept or (True,) * len(row.token_ids)
        for token, keep, nats in zip(row.token_ids, kept, row.logprobs, strict=True):
            at = numbers.setdefault((at, token), len(numbers))
            if keep:
                place = places.setdefault(at, _Place())
                place.advantage += row.advantage
                place.squares += row.advantage**2
                place.width += -math.expm1(min(0.0, nats))
                place.rows += 1
    return list(places.values())
