"""Adam whose steps grow with the signal: small advantages, and groups that disagree, move little.

Adam divides the mean of the gradients by the root of the mean of their squares. With few steps the
two are the same numbers, so each coordinate moves by the learning rate in the direction of its
sign, whatever the advantages were: advantages times 0.001 gave 87 % of the update, and groups
scored at random gave all of it. Here the second moment comes from the step's n groups, each at a
reference signal:

    g = sum of g_i                          g_i: gradient of group i in the step's loss
    q = n * sum of (g_i * max(1, reference / s_i))^2
                                            s_i: root mean square of its advantages, less
                                            what cancels (`learner.grpo.optimizer`)
    m = b1 m + (1 - b1) g                   from 0 at the start of the run
    u = b2 u + (1 - b2) q                   from 0 at the start of the run
    v = b2 v + (1 - b2) q                   from the parent's
                                            each corrected for its start as in Adam
    weight -= rate * n / (n + k) * m / (sqrt(max(u, v)) + eps)

The direction is this run's alone. With the parent's m a run of three steps with advantages times
0.01 moved 0.80 of a whole update, in the direction of the run before. The parent's v goes on, and
damps what used to have large gradients. Beside u it cannot make a step larger: m begins anew, and
where gradients grow from one run to the next, v alone would lag behind and let it move up to
1 / sqrt(1 - b2) = 10 times the rate. In the first run of a line u and v are the same.

Groups whose answers differ by no more than noise were left out before. They say that there was
little to learn, so k of them beside n shrink the step by n / (n + k), as groups of zero gradient do
in a mean. Without it one group of noise that passed the gate moved the weights as far as four
sound ones.

A group whose s_i is nearly 0 adds nothing to g and q, and counts in n: its gradient is rounding,
which the division would blow up to the size of a sound one.

By the inequality of Cauchy and Schwarz g^2 <= n * sum of g_i^2, so a coordinate moves by at most
`rate` in the first step of a run, and later by at most the root of the sum over its steps of
(weight in m)^2 / (weight in u): 1.01 times in 4 steps, 1.05 in 12, 2.35 in endless ones. It moves
by `rate` where all groups agree at the reference signal. Groups that push in independent directions
move it by rate / sqrt(n), and advantages times c < 1 by c times as much.
Source of Adam: arXiv:1412.6980. No weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from learner.errors import NonFiniteError
from learner.ranks import Ranks
from learner.records import TrainableRow, TrainingGroup

MAX_GRAD_NORM = 1.0
"""A gradient with a larger norm is scaled down to it, and the update with it."""
REFERENCE_SPREAD = 0.25
"""Spread of a group's scores above which the update no longer grows with it."""
EPSILON = 1e-8
"""As in torch.optim.AdamW."""
LEAST_SIGNAL = 1e-6
"""Share of the reference signal under which a group's gradient is not taken: it is rounding, and
the parts of the loss that do not grow with the advantages. Divided by so small a signal, they would
fill the second moment, and the sound groups of the step would move nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """Constants of the update."""

    rate: float
    """Change of a weight in one step on which all groups agree."""
    betas: tuple[float, float]
    warmup: int
    """Steps over which the rate rises to its value, counted from the first adapter of a line."""
    reference: float
    """Root mean square of a group's advantages, in score units, above which the update no longer
    grows with it."""
    max_norm: float
    """A gradient with a larger L2 norm is scaled down to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Moments after some steps. The tensors are never changed in place.

    `steps` and `second` go on from adapter to adapter; the others are of one run, for what goes on
    with it after a kill.
    """

    steps: int
    """Since the first adapter of the line."""
    second: Mapping[str, Tensor]
    """Parameter name -> running mean of the groups' squares over these steps."""
    run_steps: int = 0
    """Since the run began."""
    first: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter name -> running mean of the gradient over the run's steps; empty before the first,
    as the next."""
    run_second: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter name -> running mean of the groups' squares over the run's steps."""

    def beside(self, parameters: Mapping[str, Parameter]) -> OptimizerState:
        """Return the moments on the devices of their parameters."""

        def placed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: one.to(parameters[name].device) for name, one in tensors.items()}

        return replace(
            self,
            first=placed(self.first),
            second=placed(self.second),
            run_second=placed(self.run_second),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Sizes of one step."""

    grad_norm: float
    """L2 norm of the gradient before it was scaled down."""
    update_norm: float
    """L2 norm of the change of the weights."""
    rate: float


class SignalAdamW:
    """Collects the gradients of a step's groups, then changes the parameters in place."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        rule: UpdateRule,
        state: OptimizerState | None = None,
    ) -> None:
        """state: beside the parent, or of this run; None starts from nothing."""
        self._parameters = parameters
        self._rule = rule
        state = state or OptimizerState(steps=0, second=self._zeros())
        if not state.run_steps:
            state = replace(state, first=self._zeros(), run_second=self._zeros())
        self._state = state
        self._forget_step()

    def _zeros(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(one, requires_grad=False)
            for name, one in self._parameters.items()
        }

    @property
    def state(self) -> OptimizerState:
        return self._state

    @property
    def gradient(self) -> Mapping[str, Tensor]:
        """Sum of the gradients that were added since the last step."""
        return self._sum

    def _forget_step(self) -> None:
        self._groups = 0
        self._quiet = 0.0
        self._sum, self._squares = self._zeros(), self._zeros()
        for parameter in self._parameters.values():
            parameter.grad = None

    def add_group(self, signal: float) -> None:
        """Take the gradient of one group from the parameters, and clear it there.

        signal: of the group (`learner.grpo.optimizer`). With less than `LEAST_SIGNAL` of the
            reference it counts as a group of zero gradient.
        """
        taken = signal >= LEAST_SIGNAL * self._rule.reference
        weak = max(1.0, self._rule.reference / signal) if taken else 0.0
        self._groups += 1
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if taken:
                self._sum[name] += parameter.grad
                self._squares[name] += (parameter.grad * weak) ** 2
            parameter.grad = None

    def add_ranks(self, ranks: Ranks) -> None:
        """Add up the groups of all processes, each of which took its own: all then step alike."""
        groups = torch.tensor([float(self._groups)], dtype=torch.float64)
        ranks.add([*self._sum.values(), *self._squares.values(), groups])
        self._groups = round(groups.item())

    def add_quiet(self, groups: float) -> None:
        """Count groups without a signal in this step; a part of one where steps share them."""
        self._quiet += groups

    def step(self) -> Update:
        """Change the parameters by the groups that were added since the last step.

        Raises: NonFiniteError, before anything is changed.
        """
        rule, old = self._rule, self._state
        steps, run_steps = old.steps + 1, old.run_steps + 1
        norm = math.sqrt(math.fsum(float((g.double() ** 2).sum()) for g in self._sum.values()))
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}")
        if not all(bool(torch.isfinite(one).all()) for one in self._squares.values()):
            # It would stay in the second moment, and no later step would move the weight.
            raise NonFiniteError(f"the square of the gradient, whose norm is {norm:.3g}, overflows")
        scale = min(1.0, rule.max_norm / norm) if norm > 0 else 1.0
        rate = rule.rate * min(1.0, steps / (rule.warmup + 1))
        b1, b2 = rule.betas
        counted = self._groups + self._quiet
        rate_of_step = rate * self._groups / counted if counted else rate
        first, second, run_second, moved = {}, {}, {}, 0.0
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                q = self._groups * self._squares[name]
                first[name] = b1 * old.first[name] + (1 - b1) * scale * self._sum[name]
                second[name] = b2 * old.second[name] + (1 - b2) * q
                run_second[name] = b2 * old.run_second[name] + (1 - b2) * q
                m = first[name] / (1 - b1**run_steps)
                of_line = second[name] / (1 - b2**steps)
                of_run = run_second[name] / (1 - b2**run_steps)
                change = rate_of_step * m / (torch.maximum(of_line, of_run).sqrt() + EPSILON)
                parameter.sub_(change.to(parameter.dtype))
                moved += float((change.double() ** 2).sum())
        self._state = OptimizerState(
            steps=steps, second=second, run_steps=run_steps, first=first, run_second=run_second
        )
        self._forget_step()
        return Update(grad_norm=norm, update_norm=math.sqrt(moved), rate=rate)


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
    """Return the places that have a part in the loss."""
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
