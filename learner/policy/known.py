"""What the files of a base say of it before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from learner.base_weights import BaseSize, base_folder, base_size
from learner.policy.architecture import architecture
from learner.policy.sizes import Sizes, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBase:
    """A base whose weights and config can be read."""

    weights: BaseSize
    config: Any  # of transformers, not typed
    """The config of the base's text model."""
    sizes: Sizes


def known_base(base_model_path: str, *, grouped: bool = True) -> KnownBase | None:
    """Read the weights' shapes and the config; None where the files do not say them. What is wrong
    with them `learner.policy.adapter_io.load_policy` says.

    grouped: as for `learner.policy.sizes.sizes`. Masks and scores of all pairs of tokens are
        counted for models whose own code computes their attention; those of latent attention on a
        CPU are not (`sizes`).
    """
    folder = base_folder(base_model_path) if base_model_path else None
    weights = base_size(folder) if folder is not None else None
    if weights is None:
        return None
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        shape = architecture(config)
        # Of a class that says nothing: None has no such attribute.
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        eager = shape.eager or not getattr(model, "_supports_sdpa", True)
        masks = len(shape.windows) if eager and shape.packs else 0
        of = sizes(config, masks=masks, eager=eager, grouped=grouped)
        return KnownBase(weights=weights, config=config, sizes=of)
    except Exception:  # noqa: BLE001  a damaged config.json raises errors of many classes
        return None
