"""Give a model the rotary frequencies that its server uses, the same for every pass.

With `longrope` and `dynamic`, transformers chooses the frequencies anew in each forward pass, by
its longest position; a pack has several answers in one pass. vLLM chooses once, at its start:

- `longrope` (Phi-3.5, Phi-4-mini): the long factors when `--max-model-len` is over the original
  length, else the short ones, whatever a request's own length is (vLLM pull request 27431).
- `dynamic`: not stretched; before pull request 41277, stretched by the whole factor.

Both sets can be computed. Which one a server uses no config says; its recorded log-probabilities do
(`learner.grpo.checks.follow_server`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from learner.policy.architecture import BY_LENGTH, DYNAMIC

FIXED = "fixed"
"""What a module's `rope_type` becomes: a kind for which transformers changes nothing."""


def fix_positions(model: Any, *, stretched: bool) -> None:  # Any: transformers is not typed
    """Set the frequencies of every rotary module whose kind chooses them by length.

    stretched: those for inputs beyond the original length; else those for inputs within it.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) not in (*BY_LENGTH, FIXED):
            continue
        module.rope_type = FIXED
        if "alpha" not in module.config.rope_parameters:  # Hunyuan's base has it, for all lengths
            frequencies, scale = _frequencies(module.config, stretched=stretched)
            module.inv_freq = frequencies.to(module.inv_freq.device)
            module.attention_scaling = scale
        if hasattr(module, "rope_init_fn"):  # Phi-3.5-MoE asks for them in each pass
            made = (module.inv_freq, module.attention_scaling)
            module.rope_init_fn = lambda _, made=made: made


def _frequencies(config: Any, *, stretched: bool) -> tuple[Tensor, float]:
    """Return the frequencies and the factor of cosine and sine, as vLLM computes them."""
    given, most = config.rope_parameters, config.max_position_embeddings
    kind, device = given["rope_type"], torch.device("cpu")
    if kind == DYNAMIC:
        length = int(most * given["factor"]) if stretched else most
        found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length)
        return found
    original = given["original_max_position_embeddings"]
    length = original + 1 if stretched else original
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length)
    usual = math.sqrt(1 + math.log(most / original) / math.log(original)) if most > original else 1
    return frequencies, given.get("long_mscale" if stretched else "short_mscale") or usual
