"""How a model's answers can be computed, by its config: packed, or one row an answer. Pure.

A pack has several answers behind one prompt, told apart by an attention mask. That is exact where
every layer that mixes tokens is attention and takes the mask. Layers with a state that runs along
the sequence (Mamba, linear attention, convolutions) would carry one answer's state into the next:
their models get one row for each answer, and no mask.

Sources: `layer_types`, `sliding_window` and the scales behind the head as transformers 5 reads them
(`configuration_utils.py`, `masking_utils.py`, `models/*/modeling_*.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Form = Literal["segments", "varlen", "paths", "dense"]
"""How attention over a pack is computed (`learner.policy.attention`)."""

FULL, SLIDING = "full_attention", "sliding_attention"
RECURRENT = (
    "mamba", "rwkv", "bamba", "jamba", "zamba", "falcon_h1", "nemotron_h", "recurrent_gemma",
    "granitemoehybrid", "lfm2", "xlstm", "minimax", "kimi_linear", "olmo_hybrid",
)  # fmt: skip
"""Beginnings of `model_type` of models with recurrent layers, some of which do not list their
layers' types."""
PURE_MAMBA = ("mamba", "mamba2", "falcon_mamba")
"""Models of Mamba layers alone. peft refuses to adapt what comes out of such a layer."""
EXPERTS_AS_PARAMETERS = (
    "mixtral", "minimax", "minimax_m2", "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum",
    "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "solar_open",
)  # fmt: skip
"""`model_type` of the models whose experts peft 0.21 adapts for "all-linear": those that
`transformers.conversion_mapping` (5.19) maps to mixtral or qwen2_moe, without qwen2_moe itself."""
OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Last parts of the names that peft then takes for experts and router, shared experts' too
(`_MOE_TARGET_MODULE_MAPPING` of `peft.utils.transformers_weight_conversion`)."""
LONGROPE, DYNAMIC = "longrope", "dynamic"
BY_LENGTH = (LONGROPE, DYNAMIC)
"""Kinds of rotary scaling whose frequencies depend on a length."""
STRETCHED = ("linear", DYNAMIC, "yarn")
"""Kinds of rotary scaling whose factor stretches the positions."""
MOST_STRETCH = 1_000
"""A larger factor is damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the trainer has to know of a model."""

    packs: bool = True
    """True: several answers may stand behind one prompt. False: each answer is a row."""
    why: str = ""
    """Why it does not pack; empty when it does."""
    refused: str = ""
    """Why it cannot be trained at all; empty when it can."""
    windows: Mapping[str, int | None] = field(default_factory=lambda: {FULL: None})
    """Type of layer -> how many of the latest positions a token sees, itself included; None: all.
    With one entry the mask is for all layers."""
    scale: float = 1.0
    """What the logits are multiplied by, behind the head."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap), behind the scale; None: they stay."""
    positions: int | None = None
    """Tokens of the longest input that the model has positions for; None: it has no limit."""
    by_length: str = ""
    """Kind of its rotary frequencies, if it is one of `BY_LENGTH`."""
    turns: tuple[int, ...] = ()
    """Lengths of inputs at which the arithmetic changes: windows, and longrope's original length.
    """
    eager: bool = False
    """True: attention has to be computed by the model's own code: other kernels leave out the cap
    of its scores."""


def architecture(config: Any) -> Architecture:  # Any: a config of transformers, not typed
    """Return what a model's config says of it. config: that of the text model."""
    why = _why_rows(config)
    scale, softcap = _behind_head(config)
    windows, rotary = _windows(config), _rotary(config)
    kind = rotary.get("rope_type")
    original = rotary.get("original_max_position_embeddings") if kind == LONGROPE else None
    return Architecture(
        packs=not why,
        why=why,
        refused=_why_refused(config),
        windows=windows,
        by_length=str(kind) if kind in BY_LENGTH else "",
        turns=tuple(sorted({size for size in (*windows.values(), original) if size})),
        positions=positions(config),
        scale=scale,
        softcap=softcap,
        eager=bool(getattr(config, "attn_logit_softcapping", None)),
    )


def positions(config: Any) -> int | None:
    """Return how many positions a model has; None where its config names no number.

    Rotary scales stretch them by their factor. With `yarn` the number may be that before its scale
    or that behind it (`vllm/config/model.py`, `_get_and_verify_max_len`), so the larger one counts.
    """
    found = getattr(config, "max_position_embeddings", None)
    if type(found) is not int or found <= 0:
        return None
    scaling = _rotary(config)
    if scaling.get("rope_type") not in STRETCHED:
        return found
    first, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if not isinstance(factor, int | float) or not 1 <= factor < MOST_STRETCH:
        return found
    return max(found, int((first if isinstance(first, int) else found) * factor))


def _why_refused(config: Any) -> str:
    name = str(getattr(config, "model_type", ""))
    if name in PURE_MAMBA:
        return f"peft adapts no layer of {name} models that vLLM serves"
    rotary = _rotary(config)
    kinds = {one.get("rope_type") for one in rotary.values() if isinstance(one, Mapping)}
    if found := [kind for kind in BY_LENGTH if kind in kinds]:
        return f"types of its layers differ in their rotary frequencies, some by {found[0]}"
    if name == "phimoe" and rotary.get("short_mscale") != rotary.get("long_mscale"):
        return "its short_mscale and long_mscale differ, and transformers chooses one in each pass"
    return ""


def _rotary(config: Any) -> Mapping[str, Any]:
    found = getattr(config, "rope_parameters", None)
    return found if isinstance(found, Mapping) else {}


def _why_rows(config: Any) -> str:
    name = str(getattr(config, "model_type", ""))
    others = sorted(set(_layer_types(config)) - {FULL, SLIDING})
    if others:
        return f"its layers are of other types than attention: {', '.join(others)}"
    if name.startswith(RECURRENT):
        return f"{name} models have layers with a state"
    return ""


def _windows(config: Any) -> dict[str, int | None]:
    size = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        size = None
    types = set(_layer_types(config)) & {FULL, SLIDING}
    if types:
        return {one: size if one == SLIDING else None for one in sorted(types)}
    return {FULL: size}


def _layer_types(config: Any) -> list[str]:
    return [str(one) for one in getattr(config, "layer_types", None) or ()]


def _behind_head(config: Any) -> tuple[float, float | None]:
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return scale, float(cap) if cap else None


def adapted_layers(model_type: str, linear: Iterable[str]) -> str | list[str]:
    """Return which layers a new adapter has, as peft's `target_modules`.

    linear: names of the decoder's linear layers. All of them; in mixtures whose experts peft would
    adapt as parameters (`EXPERTS_AS_PARAMETERS`) those that it does not take for experts by their
    name, which are attention's: the rest is no plain LoRA, the canary would refuse it, and each
    layer would keep its experts' weights twice while it trains.
    """
    if model_type not in EXPERTS_AS_PARAMETERS:
        return "all-linear"
    return sorted({name.rpartition(".")[2] for name in linear} - OF_EXPERTS)


def blocks_of(decoder: Any) -> list[nn.Module]:  # Any: a decoder of transformers, not typed
    """Return the decoder's blocks: the longest list of modules that it has itself."""
    lists = [list(module) for module in decoder.children() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


# Give a model the rotary frequencies that its server uses, the same for every pass.

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
