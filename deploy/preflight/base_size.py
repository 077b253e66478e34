"""Warn of a learning rate that was measured on a base much smaller than this one."""

from __future__ import annotations

import json
from types import SimpleNamespace

from learner.base_weights import base_folder
from learner.policy.sizes import sizes
from sidecar.settings import Settings
from sidecar.settings.checks.problem import is_given
from sidecar.visible import visible

LARGE = 1.5e9
"""Parameters from which on a base is warned of: clearly more than the 135 million of the model that
the default was measured on, and more than what is sold as "1B" (Llama 3.2 1B: 1.24e9)."""
TEXT_CONFIGS = ("text_config", "llm_config")
"""Where a multimodal model's config holds that of its text model."""


def large_base(settings: Settings) -> list[str]:
    """Return a warning when the learning rate is left at its default and the base is large.

    A base without a config on this machine, or with one that cannot be read, gives none: whether
    the learner can load it is a question of `learner.ready`.
    """
    rules, path = settings.learner, settings.serving.base_model_path
    if not path or is_given(rules, "learning_rate"):
        return []
    found = parameters_of(path)
    if found is None or found < LARGE:
        return []
    return [
        f"learner.learning_rate is left at its default, {rules.learning_rate:g}, which was "
        f"measured on a model of 0.135 billion parameters; {visible(path)} has about "
        f"{found / 1e9:.1f} billion by its config.json, and such models want less: set "
        "5e-5 for 7 to 8 billion, or the default itself to keep it (docs/settings.md)"
    ]


def parameters_of(base_model_path: str) -> float | None:
    """Estimate the parameters that a token uses, from the config of a base; None: not known.

    base_model_path: a folder, or a name of the Hugging Face Hub whose config is in the cache.
    Of a mixture of experts only the chosen ones count. Norms, biases and a head of its own that the
    config does not mention are left out.
    """
    folder = base_folder(base_model_path)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
        config = next((config[one] for one in TEXT_CONFIGS if one in config), config)
        of = sizes(SimpleNamespace(**config))
        heads = 1 if config.get("tie_word_embeddings", True) else 2
        return float(of.layers * of.linear_weights + heads * int(config["vocab_size"]) * of.hidden)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None  # see `large_base`
