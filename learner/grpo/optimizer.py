"""AdamW whose steps grow with the signal: small advantages, and groups that disagree, move little.

AdamW divides the mean of the gradients by the root of the mean of their squares. With few steps the
two are the same numbers, so each coordinate moves by the learning rate in the direction of its
sign, whatever the advantages were: advantages times 0.001 gave 87 % of the update, and groups
scored at random gave all of it. Here the second moment comes from the step's n groups, each at a
reference signal:

    g = sum of g_i                          g_i: gradient of group i in the step's loss
    q = n * sum of (g_i * max(1, reference / s_i))^2
                                            s_i: root mean square of its advantages, less
                                            what cancels (`learner.grpo.signal`)
    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) q,  both corrected for their start as in Adam
    weight -= rate * m / (sqrt(v) + eps)

Groups whose answers differ by no more than noise were left out before. They say that there was
little to learn, so k of them beside n shrink the step by n / (n + k), as groups of zero gradient do
in a mean; q is multiplied by ((n + k) / n)^2. Without it one group of noise that passed the gate
moved the weights as far as four sound ones.

A group whose s_i is nearly 0 adds nothing to g and q, and counts in n: its gradient is rounding,
which the division would blow up to the size of a sound one.

By the inequality of Cauchy and Schwarz g^2 <= n * sum of g_i^2, so a coordinate moves by at most
`rate`. It does where all groups agree at the reference signal. Groups that push in independent
directions move it by rate / sqrt(n), and advantages times c < 1 by c times as much.
Source of AdamW: arXiv:1711.05101. The moments go on from the parent's: `OptimizerState`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from learner.errors import NonFiniteError
from learner.ranks import Ranks

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
    """Largest change of a weight in one step."""
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
    """Moments after some steps. The tensors are never changed in place."""

    steps: int
    first: Mapping[str, Tensor]
    """Parameter name -> running mean of the gradient."""
    second: Mapping[str, Tensor]
    """Parameter name -> running mean of the groups' squares."""

    def beside(self, parameters: Mapping[str, Parameter]) -> OptimizerState:
        """Return the moments on the devices of their parameters."""
        first = {name: m.to(parameters[name].device) for name, m in self.first.items()}
        second = {name: v.to(parameters[name].device) for name, v in self.second.items()}
        return OptimizerState(steps=self.steps, first=first, second=second)


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
        """state: of the parent; None starts from nothing."""
        self._parameters = parameters
        self._rule = rule
        self._state = state or OptimizerState(
            steps=0,
            first={
                name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()
            },
            second={
                name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()
            },
        )
        self._forget_step()

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
        self._sum = {name: torch.zeros_like(m) for name, m in self._state.first.items()}
        self._squares = {name: torch.zeros_like(m) for name, m in self._state.first.items()}
        for parameter in self._parameters.values():
            parameter.grad = None

    def add_group(self, signal: float) -> None:
        """Take the gradient of one group from the parameters, and clear it there.

        signal: of the group (`learner.grpo.signal`). With less than `LEAST_SIGNAL` of the
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
        rule, steps = self._rule, self._state.steps + 1
        norm = math.sqrt(math.fsum(float((g.double() ** 2).sum()) for g in self._sum.values()))
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}")
        if not all(bool(torch.isfinite(one).all()) for one in self._squares.values()):
            # It would stay in the second moment, and no later step would move the weight.
            raise NonFiniteError(f"the square of the gradient, whose norm is {norm:.3g}, overflows")
        scale = min(1.0, rule.max_norm / norm) if norm > 0 else 1.0
        rate = rule.rate * min(1.0, steps / (rule.warmup + 1))
        b1, b2 = rule.betas
        diluted = (self._groups + self._quiet) ** 2 / max(1, self._groups)
        first, second, moved = {}, {}, 0.0
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                m = b1 * self._state.first[name] + (1 - b1) * scale * self._sum[name]
                v = b2 * self._state.second[name] + (1 - b2) * diluted * self._squares[name]
                root = (v / (1 - b2**steps)).sqrt() + EPSILON
                change = rate * (m / (1 - b1**steps)) / root
                parameter.sub_(change.to(parameter.dtype))
                moved += float((change.double() ** 2).sum())
                first[name], second[name] = m, v
        self._state = OptimizerState(steps=steps, first=first, second=second)
        self._forget_step()
        return Update(grad_norm=norm, update_norm=math.sqrt(moved), rate=rate)
