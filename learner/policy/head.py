"""Log-probabilities of targets behind a frozen head, without logits of all tokens at once.

A vocabulary of 152,000 makes 2.4 GB of fp32 logits for 4,000 targets, and the plain form keeps
them, their log-softmax and two gradients. Here logits exist for a few hundred targets at a time;
the backward pass computes them once more, unless they all fit. The head gets no gradient: it is
never trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.policy.sizes import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Head:
    """A model's head, and what the model does to the logits behind it."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    """What the logits are multiplied by."""
    softcap: float | None = None
    """Then they become softcap * tanh(logits / softcap)."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V] fp32, before the temperature. bf16 weights are not copied to fp32 where the device
        multiplies them into fp32 itself."""
        weight_HV = self.weight_VH.t()
        if hidden_NH.is_cuda and self.weight_VH.dtype != torch.float32:
            logits_NV = torch.mm(
                hidden_NH.to(self.weight_VH.dtype), weight_HV, out_dtype=torch.float32
            )
        else:
            logits_NV = hidden_NH.float() @ weight_HV.float()
        if self.bias_V is not None:
            logits_NV += self.bias_V.float()
        if self.scale != 1.0:
            logits_NV *= self.scale
        if self.softcap is not None:
            logits_NV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_NV

    def to_hidden(self, gradient_NV: Tensor, logits_NV: Tensor) -> Tensor:
        """[N, H] fp32: the gradient of the hidden states, from that of the logits.

        gradient_NV: is overwritten. logits_NV: as `logits` returned them.
        """
        if self.softcap is not None:
            gradient_NV *= 1 - (logits_NV / self.softcap) ** 2
        if self.scale != 1.0:
            gradient_NV *= self.scale
        if gradient_NV.is_cuda and self.weight_VH.dtype != torch.float32:
            kept = gradient_NV.to(self.weight_VH.dtype)
            return torch.mm(kept, self.weight_VH, out_dtype=torch.float32)
        return gradient_NV @ self.weight_VH.float()


def target_logprobs(
    head: Head, hidden_NH: Tensor, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies of the targets' distributions.

    targets_N: token ids. temperatures_N: above 0; the logits are divided by them.
    Returns: [N] nats, fp32, with a gradient to the hidden states; and [N] nats without one.
    """
    found: tuple[Tensor, Tensor] = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, targets_N, temperatures_N.float(), head
    )
    return found


def chunks(targets: int, vocabulary: int) -> list[slice]:
    """Return slices of the targets whose logits are at most `CHUNK_BYTES`, or of one target."""
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [slice(at, min(at + size, targets)) for at in range(0, targets, size)]


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, targets_N: Tensor, temperatures_N: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        parts = chunks(len(targets_N), head.weight_VH.shape[0])
        kept_NV = torch.empty(0)
        logprobs_N = torch.empty(len(targets_N), device=hidden_NH.device)
        entropies_N = torch.empty_like(logprobs_N)
        normalisers_N = torch.empty_like(logprobs_N)
        for part in parts:
            logits_CV = head.logits(hidden_NH[part])
            if len(parts) == 1 and ctx.needs_input_grad[0]:
                kept_NV = logits_CV
                logits_CV = logits_CV / temperatures_N[part, None]
            else:
                logits_CV /= temperatures_N[part, None]
            normalisers_N[part] = logits_CV.logsumexp(-1)
            logits_CV -= normalisers_N[part, None]
            logprobs_N[part] = logits_CV.gather(-1, targets_N[part, None])[:, 0]
            entropies_N[part] = -(logits_CV.exp() * logits_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, targets_N, temperatures_N, normalisers_N, kept_NV)
        ctx.head = head
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_N, head = gradients[0], ctx.head
        hidden_NH, targets_N, temperatures_N, normalisers_N, kept_NV = ctx.saved_tensors
        gradient_NH = torch.empty_like(hidden_NH)
        for part in chunks(len(targets_N), head.weight_VH.shape[0]):
            logits_CV = kept_NV if len(kept_NV) else head.logits(hidden_NH[part])
            # d log p(target) / d logits = (1 at the target, else 0) - p, over the temperature
            weights_C1 = (gradient_N[part] / temperatures_N[part])[:, None]
            gradient_CV = logits_CV / temperatures_N[part, None]
            gradient_CV.sub_(normalisers_N[part, None]).exp_().mul_(-weights_C1)
            gradient_CV.scatter_add_(-1, targets_N[part, None], weights_C1)
            gradient_NH[part] = head.to_hidden(gradient_CV, logits_CV).to(gradient_NH.dtype)
        return gradient_NH, None, None, None
