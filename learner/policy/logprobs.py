"""Log-probabilities of a pack's targets, as vLLM would report them, behind a frozen head.

The decoder runs once over the pack; the head only where a trainable token is predicted. Logits are
fp32 and divided by the temperature of their own answer. `learner.policy.architecture` says what
else a model needs: windows of attention, caps and scales of the logits, or a row for each answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from learner.policy.architecture import Architecture, Form
from learner.policy.attention import added_mask, dense_mask, plan
from learner.policy.costs import CHUNK_BYTES, CHUNK_BYTES_ON_CUDA, SHARED, Prices, cheapest
from learner.policy.packing import Pack, fed, pack_group, pack_members, shared, unique_tokens
from learner.records import TrainableRow, TrainingGroup

# Log-probabilities of targets behind a frozen head, without logits of all tokens at once.


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

    def to_hidden(self, gradient_NV: Tensor, logits_NV: Tensor, temperatures_N1: Tensor) -> Tensor:
        """[N, H] fp32: the gradient of the hidden states, from that of the logits.

        gradient_NV: is overwritten. logits_NV: over the temperatures; read with a `softcap` alone.
        """
        if self.softcap is not None:
            gradient_NV *= 1 - (logits_NV * temperatures_N1 / self.softcap) ** 2
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


def chunks(targets: int, vocabulary: int, *, cuda: bool = False) -> list[slice]:
    """Return slices of the targets whose logits are at most `CHUNK_BYTES`, or of one target."""
    size = max(1, (CHUNK_BYTES_ON_CUDA if cuda else CHUNK_BYTES) // (4 * vocabulary))
    return [slice(at, min(at + size, targets)) for at in range(0, targets, size)]


class _TargetLogprobs(torch.autograd.Function):
    """Has the gradient while it has the logits: it only scales with what comes from the loss."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, targets_N: Tensor, temperatures_N: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(targets_N), device=hidden_NH.device)
        entropies_N = torch.empty_like(logprobs_N)
        wanted = ctx.needs_input_grad[0]
        gradient_NH = torch.empty_like(hidden_NH if wanted else logprobs_N, dtype=torch.float32)
        for part in chunks(len(targets_N), head.weight_VH.shape[0], cuda=targets_N.is_cuda):
            targets_C1, temperatures_C1 = targets_N[part, None], temperatures_N[part, None]
            logits_CV = head.logits(hidden_NH[part]).div_(temperatures_C1)
            found_CV = torch.log_softmax(logits_CV, -1)
            logprobs_N[part] = found_CV.gather(-1, targets_C1)[:, 0]
            unread_CV = logits_CV if head.softcap is None else None
            entropies_N[part] = torch.special.entr(found_CV.exp_(), out=unread_CV).sum(-1)
            if wanted:
                # d log p(target) / d logits = (1 at the target, else 0) - p, over the temperature
                found_CV.scatter_add_(-1, targets_C1, torch.full_like(temperatures_C1, -1))
                gradient_CH = head.to_hidden(found_CV, logits_CV, temperatures_C1)
                gradient_NH[part] = gradient_CH.div_(-temperatures_C1)
        ctx.save_for_backward(gradient_NH)
        ctx.kind = hidden_NH.dtype
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_NH,) = ctx.saved_tensors
        return (gradients[0][:, None] * gradient_NH).to(ctx.kind), None, None, None


Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with its LoRA, its device and its precision."""

    model: Any  # Any: a transformers causal LM wrapped by peft; neither is typed
    device: torch.device
    autocast: bool
    """True: matrix products in bf16; the residual stream, the head and the adapter stay fp32."""
    shape: Architecture = field(default_factory=Architecture)
    form: Form = "dense"
    """How attention over a pack is computed (`learner.policy.attention`)."""
    prices: Prices = field(default_factory=Prices)
    """What parts of a pack cost."""
    joint: int = 0
    """`learner.policy.memory.Prepared.joint`."""

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return int(self.model.get_base_model().get_input_embeddings().weight.shape[0])

    def logprobs(self, pack: Pack) -> tuple[Tensor, float]:
        """Compute the log-probabilities of the targets, and the sum of the entropies.

        Returns: [N] nats, fp32, with gradient unless it is switched off; and the entropy of the
            targets' distributions, in nats, summed over the N tokens.
        """
        hidden_TH = self._hidden(pack)
        logprobs_N, entropies_N = target_logprobs(
            self._head(),
            hidden_TH[self._tensor(pack.sources)],
            self._tensor(pack.targets),
            self._tensor(pack.temperatures),
        )
        return logprobs_N, float(entropies_N.sum())

    def distributions(self, pack: Pack) -> Tensor:
        """[N, V] nats, fp32: the whole distributions of a pack's targets, at temperature 1."""
        hidden_NH = self._hidden(pack)[self._tensor(pack.sources)]
        return torch.log_softmax(self._head().logits(hidden_NH), dim=-1)

    def _hidden(self, pack: Pack) -> Tensor:
        decoder = self.model.get_base_model().get_decoder()
        with self.precision():
            output = decoder(
                input_ids=self._tensor(pack.input_ids)[None],
                position_ids=self._tensor(pack.positions)[None],
                use_cache=False,
                **self._attention(pack, next(decoder.parameters()).dtype),
            )
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH

    def _attention(self, pack: Pack, dtype: torch.dtype) -> dict[str, Any]:
        if not self.shape.packs:
            return {"attention_mask": None}  # the model's own
        dtype = torch.bfloat16 if self.autocast else dtype
        if self.form == "dense":
            return {"attention_mask": self._masks(pack, dtype)}
        # A mask of four dimensions keeps the model from making one; nobody reads it.
        unread = torch.zeros(1, 1, 1, 1, dtype=dtype, device=self.device)
        windows = self.shape.windows
        return {
            "attention_mask": dict.fromkeys(windows, unread) if len(windows) > 1 else unread,
            "trie": plan(pack.segments, windows, self.form, self.device, dtype),
        }

    def _masks(self, pack: Pack, dtype: torch.dtype) -> Tensor | Mapping[str, Tensor]:
        """Build [1, 1, T, T] for all layers, or one by type of layer.

        They are added to the scores as they are: from a mask of booleans each layer would make one
        of numbers and keep it for its backward pass.
        """
        positions_T = self._tensor(pack.positions)
        seen_TT = dense_mask(pack.segments, self.device)
        masks: dict[str, Tensor] = {}
        for kind, window in self.shape.windows.items():
            near_TT = seen_TT
            if window is not None:
                near_TT = seen_TT & (positions_T[:, None] - positions_T[None, :] < window)
            masks[kind] = added_mask(near_TT, dtype)[None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _head(self) -> Head:
        head = self.model.get_base_model().get_output_embeddings()
        return Head(
            weight_VH=head.weight,
            bias_V=getattr(head, "bias", None),
            scale=self.shape.scale,
            softcap=self.shape.softcap,
        )

    def precision(self) -> AbstractContextManager[None]:
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _tensor(self, values: tuple[int, ...] | tuple[float, ...]) -> Tensor:
        return torch.tensor(values, device=self.device)


def packs_of(policy: Policy, group: TrainingGroup, max_tokens: int) -> list[Pack]:
    """Pack the trainable answers of a group, in order, in the cheapest way that the model allows.

    max_tokens: longest pack; an answer that does not fit alone gets a pack of its own.
    """
    if not policy.shape.packs:
        return pack_group(group, max_tokens=max_tokens, alone=True)
    return cheapest(group, max_tokens=max_tokens, of=policy.prices, form=policy.form)


def wants_autocast(precision: Precision, device: torch.device) -> bool:
    """Return True when matrix products run in bf16.

    `auto` uses bf16 if the processor has instructions for it. There a step took 0.55 of the fp32
    time (AVX-512 BF16), and the result is closer to a bf16 server's: in both, a small LoRA term is
    lost in the rounding of the sum. With a trained adapter, the server's log-probabilities differed
    by 0.0365 nats a token from a bf16 trainer's, mean +0.0007 +- 0.0013, and by 0.0489, mean
    +0.0064 +- 0.0018, from an fp32 trainer's.
    """
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":  # older cards than NVIDIA's Ampere only emulate it
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16") or features.get("bf16"))


# Groups that are computed in one pack. Pure index arithmetic.

LEAST_SHARED = 0.25
"""Part of a prompt that must be shared with the group before it, to join it."""


def joint_groups(
    groups: Sequence[TrainingGroup], *, max_tokens: int = 0, room: int = 0
) -> list[list[int]]:
    """Sort groups into those that are computed together, as indices; each is in one list.

    max_tokens: longest pack of groups that begin alike. room: tokens up to which any groups share a
    pack. A group that is longer stays alone.
    """
    order = sorted(range(len(groups)), key=lambda number: groups[number].prompt_token_ids)
    found: list[list[int]] = []
    left = room
    for number in order:
        tokens = _needed(groups[number]) if room else 1
        alike = max_tokens and found and _alike(groups, found[-1], number, max_tokens)
        if alike or (found and tokens <= left):
            found[-1].append(number)
        else:
            found.append([number])
            left = room
        left -= tokens
    return found


def joint_pack(groups: Sequence[TrainingGroup]) -> Pack:
    """Pack the trainable answers of these groups into one, in order; what they share, once."""
    return pack_members(_members(groups), least=SHARED)


def _members(groups: Sequence[TrainingGroup]) -> list[tuple[TrainingGroup, TrainableRow]]:
    return [(group, row) for group in groups for row in group.rows if row.trainable]


def _needed(group: TrainingGroup) -> int:
    return unique_tokens([fed(group, row) for _, row in _members([group])], least=SHARED)


def _alike(
    groups: Sequence[TrainingGroup], together: Sequence[int], number: int, max_tokens: int
) -> bool:
    prompt = groups[number].prompt_token_ids
    common = shared(prompt, 0, groups[together[-1]].prompt_token_ids)
    if common < LEAST_SHARED * len(prompt):
        return False
    members = _members([groups[one] for one in (*together, number)])
    return unique_tokens([fed(*one) for one in members], least=SHARED) <= max_tokens
