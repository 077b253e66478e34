"""Say whether an adapter's config is that of a plain LoRA. Pure.

A plain LoRA adds two matrices to each layer that it names. peft knows many kinds that look alike
and are more: they route, sample or project, have weights of their own, or change the base's. Such
an adapter cannot be served as it was trained, or be continued and saved. Members that an older peft
lacked are refused where they switch something on; those of a release to come are not known, so the
rule for them is by their value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TASKS = (None, "CAUSAL_LM")
"""Values of `task_type` with which peft puts a LoRA around a causal model and adds nothing."""
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Initialisations that keep the base's weights; the others (PiSSA, OLoRA, ...) change them."""
_INIT_CONFIGS = {"eva_config": "eva", "lora_ga_config": "lora_ga"}
"""Configs of an initialisation, and the `init_lora_weights` that reads them."""
_SWITCHES = (
    "alora_invocation_tokens",
    "layer_replication",
    "loftq_config",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)
"""Members that switch a feature on, by any value but null, false and empty ones."""
_FEATURE_CONFIGS = (
    "arrow_config",
    "corda_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "velora_config",
)
"""Members that switch a feature on, by any value but null and false: peft takes an empty object for
the feature's defaults."""
_FLAGS = ("ensure_weight_tying", "fan_in_fan_out", "inference_mode", "use_rslora")
"""Members of a plain LoRA that are true or false."""
_KNOWN = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        *_FLAGS,
        *_INIT_CONFIGS,
    }
)
"""Members that a plain LoRA may have set. peft 0.21 writes them and the features' above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlain:
    """Why a config is not that of a plain LoRA."""

    member: str
    why: str
    """Completes the sentence "MEMBER is VALUE, ..."."""


def not_plain_lora(config: Mapping[str, Any]) -> NotPlain | None:
    """Return the first member that no plain LoRA has, or has with another value; None: it is one.

    config: parsed `adapter_config.json`. Rank, alpha, modules and layers are not looked at.
    """
    if config.get("task_type") not in TASKS:
        return NotPlain(
            member="task_type",
            why="and only CAUSAL_LM can be served and continued; write CAUSAL_LM there if it is "
            "an adapter of a causal model without a head of its own",
        )
    if config.get("bias", "none") != "none":
        return NotPlain(member="bias", why="and biases cannot be served")
    for name in _FLAGS:
        if config.get(name) is not None and type(config[name]) is not bool:
            return NotPlain(member=name, why="which is not true or false")
    dropout = config.get("lora_dropout", 0.0)
    if dropout is not False and (type(dropout) not in (int, float) or not 0 <= dropout <= 1):
        return NotPlain(member="lora_dropout", why="which is no number of 0 to 1")
    return _of_init(config) or _of_features(config)


def _of_init(config: Mapping[str, Any]) -> NotPlain | None:
    init = config.get("init_lora_weights")
    if isinstance(init, str):
        if init.lower() not in PLAIN_INITS:
            return NotPlain(member="init_lora_weights", why="which may change the base's weights")
    elif init is not None and type(init) is not bool:
        return NotPlain(
            member="init_lora_weights", why="which is not true, false or an initialisation's name"
        )
    for name, reader in _INIT_CONFIGS.items():
        found = config.get(name)
        if found is None:
            continue
        plain = isinstance(found, dict) and not any(
            isinstance(one, (dict, list)) for one in found.values()
        )
        if not plain or not isinstance(init, str) or init.lower() != reader:
            return NotPlain(
                member=name, why=f"and init_lora_weights is not {reader}; remove it there"
            )
    return None


def _of_features(config: Mapping[str, Any]) -> NotPlain | None:
    unserved = (
        "which is no part of a plain LoRA; DoRA, biases, saved modules and the like cannot be "
        "served: merge such an adapter into the base"
    )
    for name in _SWITCHES:
        if config.get(name):
            return NotPlain(member=name, why=unserved)
    for name in _FEATURE_CONFIGS:
        found = config.get(name)
        if found is not None and found is not False:
            return NotPlain(member=name, why=unserved)
    for name in config.keys() - _KNOWN - {*_SWITCHES, *_FEATURE_CONFIGS}:
        found = config[name]
        # A number or a text is a parameter; what switches a feature on was always one of these.
        if found is True or (isinstance(found, (dict, list)) and found):
            return NotPlain(
                member=name,
                why="and this release does not know what it does; set it to null there if it does "
                "nothing",
            )
    return None
