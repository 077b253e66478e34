"""Load a base model with a trainable LoRA, and save that LoRA as a standard PEFT folder.

Every linear layer of the decoder is adapted, the head and the embeddings never: servers drop or
mishandle LoRA there. What was saved is read back and checked, because a matrix that is silently
missing would serve the base's answers under the adapter's name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from learner.adapter_folder import CONFIG, WEIGHTS
from learner.errors import IncompleteAdapterError, NonFiniteError, ParentError
from learner.logprobs import Policy, wants_autocast
from learner.records import Parent
from sidecar.settings import Learner

_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""What transformers and peft raise for a missing folder, a broken file or another shape."""


def load_policy(base_model_path: str, parent: Parent, settings: Learner) -> Policy:
    """The base with the parent's adapter, or with a fresh one that changes nothing yet.

    Raises: ParentError when the base or the parent is missing, broken or of another shape.
    """
    if not base_model_path:
        raise ParentError("serving.base_model_path is empty; name the weights that vLLM serves")
    transformers_logging.disable_progress_bar()
    device = torch.device(settings.device)
    autocast = wants_autocast(settings.precision, device)
    # fp32 weights on a CPU keep the residual stream in fp32; on a GPU memory is dearer.
    dtype = torch.bfloat16 if autocast and device.type == "cuda" else torch.float32
    try:
        base = AutoModelForCausalLM.from_pretrained(
            base_model_path, dtype=dtype, attn_implementation="sdpa"
        )
    except _LOAD_ERRORS as error:
        raise ParentError(f"base {base_model_path} cannot be loaded: {error}") from error
    model = _with_adapter(base, parent, settings)
    # peft notes where it found the base; what must stand there is the name that vLLM knows.
    model.peft_config["default"].base_model_name_or_path = base_model_path
    return Policy(model=model.to(device), device=device, autocast=autocast)


def _with_adapter(base: Any, parent: Parent, settings: Learner) -> Any:  # Any: peft is not typed
    if parent.path is None:
        torch.manual_seed(settings.seed)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return get_peft_model(base, config)
    if not (parent.path / CONFIG).is_file():
        raise ParentError(f"parent {parent.name}: {parent.path / CONFIG} is missing")
    try:
        model = PeftModel.from_pretrained(base, str(parent.path), is_trainable=True)
        check_folder(model, parent.path)
    except _LOAD_ERRORS as error:
        raise ParentError(f"parent {parent.name} cannot be loaded: {error}") from error
    return model


def save_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapter's config and weights, and check what was written.

    Raises: NonFiniteError, IncompleteAdapterError; OSError when the disk refuses.
    """
    policy.model.save_pretrained(str(folder))
    _write_canonical(folder / CONFIG)
    check_folder(policy.model, folder)


def _write_canonical(path: Path) -> None:
    """Sort a config: peft writes its sets in an order that differs from process to process, and
    the same adapter must have the same digest."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_folder(model: Any, folder: Path) -> None:  # Any: as above
    """Every LoRA matrix of the model is in the file, no other, and every number is finite.

    Raises: NonFiniteError, IncompleteAdapterError.
    """
    weights = load_file(folder / WEIGHTS)
    expected = {
        f"{name}.{matrix}.weight"
        for name, module in model.named_modules()
        for matrix in ("lora_A", "lora_B")
        if "default" in getattr(module, matrix, ())
    }
    if not expected or expected != weights.keys():
        missing, foreign = expected - weights.keys(), weights.keys() - expected
        raise IncompleteAdapterError(
            f"{folder / WEIGHTS}: {len(missing)} matrices missing, {len(foreign)} foreign, "
            f"{len(expected)} expected; first: {min(missing | foreign, default='none')}"
        )
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"{name} holds an infinity or NaN")
