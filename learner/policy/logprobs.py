"""Log-probabilities of a pack's targets under a model, as vLLM would report them.

The decoder runs once over the pack; the head only where a trainable token is predicted. Logits are
fp32 and divided by the temperature of their own answer. `learner.policy.architecture` says what
else a model needs: windows of attention, caps and scales of the logits, or a row for each answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from learner.policy.architecture import Architecture, Form
from learner.policy.attention.segments import added_mask, dense_mask, plan
from learner.policy.costs import Prices, cheapest
from learner.policy.head import Head, target_logprobs
from learner.policy.packing import Pack, pack_group
from learner.records import TrainingGroup

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
    """How attention over a pack is computed (`learner.policy.attention.segments`)."""
    prices: Prices = field(default_factory=Prices)
    """What parts of a pack cost."""

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
        """Return the decoder's arguments that say what each token attends to."""
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
        """Return the context in which matrix products run in the policy's precision."""
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
