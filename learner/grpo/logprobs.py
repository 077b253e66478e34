"""Log-probabilities of a pack's targets under a model, as vLLM would report them.

The decoder runs once over the pack; the head only where a trainable token is predicted. Logits are
fp32 and divided by the temperature of their own answer. Models that change their logits after the
head (soft caps, logit scales) are not supported; the drift check refuses those.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from learner.grpo.packing import Pack

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with its LoRA, its device and its precision."""

    model: Any  # Any: a transformers causal LM wrapped by peft; neither is typed
    device: torch.device
    autocast: bool
    """True: matrix products in bf16; the residual stream, the head and the adapter stay fp32."""

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
        logits_NV = self._logits(hidden_TH[self._tensor(pack.sources)])
        logits_NV = logits_NV / self._tensor(pack.temperatures)[:, None]
        logprobs_NV = functional.log_softmax(logits_NV, dim=-1)
        targets_N1 = self._tensor(pack.targets)[:, None]
        with torch.no_grad():
            entropy = -float((logprobs_NV.exp() * logprobs_NV).sum())
        return logprobs_NV.gather(-1, targets_N1)[:, 0], entropy

    def _hidden(self, pack: Pack) -> Tensor:
        decoder = self.model.get_base_model().get_decoder()
        # Added to the scores as it is: from a mask of booleans each layer would make one of numbers
        # and keep it for its backward pass.
        dtype = torch.bfloat16 if self.autocast else next(decoder.parameters()).dtype
        mask_TT = added_mask(attention_mask(self._tensor(pack.segments)), dtype)
        with self._precision():
            output = decoder(
                input_ids=self._tensor(pack.input_ids)[None],
                position_ids=self._tensor(pack.positions)[None],
                attention_mask=mask_TT[None, None],
                use_cache=False,
            )
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH

    def _logits(self, hidden_NH: Tensor) -> Tensor:
        head = self.model.get_base_model().get_output_embeddings()
        bias = getattr(head, "bias", None)
        bias_V = bias.float() if bias is not None else None
        return functional.linear(hidden_NH.float(), head.weight.float(), bias_V)

    def _precision(self) -> AbstractContextManager[None]:
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _tensor(self, values: tuple[int, ...] | tuple[float, ...]) -> Tensor:
        return torch.tensor(values, device=self.device)


def attention_mask(segments_T: Tensor) -> Tensor:
    """Build the attention mask: [T, T] bool, row = query, column = key, True = may attend.

    A token attends to itself and to earlier tokens of the prompt (segment 0) and its own segment.
    """
    order_T = torch.arange(len(segments_T), device=segments_T.device)
    past_TT = order_T[None, :] <= order_T[:, None]
    own_TT = segments_T[None, :] == segments_T[:, None]
    return past_TT & (own_TT | (segments_T == 0)[None, :])


def added_mask(mask_TT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, T] of this type: 0 where a token may attend, minus infinity where it may not."""
    return torch.zeros_like(mask_TT, dtype=dtype).masked_fill(~mask_TT, -torch.inf)


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
    if device.type == "cuda":
        return True
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16") or features.get("bf16"))
