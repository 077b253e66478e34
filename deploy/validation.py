"""Is this folder an adapter that our vLLM can serve? Asked before it is loaded anywhere.

Reads files only. It is strict about what vLLM does not do (DoRA, biases, saved modules) and about
what could run code or poison every reply (pickles, infinities), and silent about quality: that is
the gate's.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import InvalidAdapterError
from deploy.safetensors_file import TensorFile, first_non_finite, read_tensors
from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What the serving vLLM takes."""

    max_rank: int
    bases: frozenset[str]
    """Names by which an adapter may call the served base; empty: any."""


def validate_folder(path: Path, *, digest: str, limits: ServingLimits) -> None:
    """Raises: InvalidAdapterError with the first thing that is wrong, in words.

    digest: what the registry recorded when the adapter was published.
    """
    if not path.is_dir():
        raise InvalidAdapterError(f"{path}: is no folder")
    _refuse_foreign_files(path)
    config = _read_config(path / CONFIG)
    _check_config(config, limits)
    file = read_tensors(path / WEIGHTS)
    _check_ranks(file, limits.max_rank)
    bad = first_non_finite(file)
    if bad is not None:
        raise InvalidAdapterError(f"{WEIGHTS}: {bad} holds an infinity or NaN")
    try:
        found = folder_digest(path)
    except OSError as error:
        raise InvalidAdapterError(f"{path}: cannot be read ({error.strerror})") from error
    if found != digest:
        raise InvalidAdapterError(
            f"digest is {found[:12]}, the registry says {digest[:12]}: the folder was changed"
        )


def _refuse_foreign_files(path: Path) -> None:
    for entry in sorted(path.iterdir()):
        if entry.is_symlink() or not entry.is_file():
            raise InvalidAdapterError(f"{entry.name}: is not a plain file")
        if entry.suffix.lower() in PICKLE_SUFFIXES:
            raise InvalidAdapterError(
                f"{entry.name}: could run code when it is read; weights must be safetensors"
            )
        if entry.suffix == ".safetensors" and entry.name != WEIGHTS:
            raise InvalidAdapterError(f"{entry.name}: an adapter has one weights file, {WEIGHTS}")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidAdapterError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidAdapterError(f"{path.name}: is not a JSON object")
    return config


def _check_config(config: dict[str, Any], limits: ServingLimits) -> None:
    if config.get("peft_type") != "LORA":
        raise InvalidAdapterError(f"{CONFIG}: peft_type is {config.get('peft_type')}, not LORA")
    ranks = [config.get("r"), *_values(config.get("rank_pattern"))]
    for rank in ranks:
        if type(rank) is not int or not 0 < rank <= limits.max_rank:
            raise InvalidAdapterError(
                f"{CONFIG}: rank {rank} is not in 1..{limits.max_rank} "
                "(serving.max_lora_rank, vLLM's --max-lora-rank)"
            )
    if config.get("use_dora") or config.get("modules_to_save") or config.get("lora_bias"):
        raise InvalidAdapterError(f"{CONFIG}: DoRA, biases and saved modules cannot be served")
    if config.get("bias", "none") != "none":
        raise InvalidAdapterError(f"{CONFIG}: bias is {config['bias']}, which cannot be served")
    base = config.get("base_model_name_or_path")
    if limits.bases and not _is_base(base, limits.bases):
        raise InvalidAdapterError(
            f"{CONFIG}: was trained on {base}, vLLM serves {' = '.join(sorted(limits.bases))}"
        )


def _values(pattern: Any) -> Collection[Any]:  # Any: a foreign file may hold anything
    return pattern.values() if isinstance(pattern, dict) else ()


def _is_base(base: Any, bases: Collection[str]) -> bool:  # Any: as above
    return isinstance(base, str) and base.rstrip("/") in {name.rstrip("/") for name in bases}


def _check_ranks(file: TensorFile, max_rank: int) -> None:
    """The weights themselves, because a config may say one rank and the file hold another."""
    pairs = 0
    for tensor in file.tensors:
        if ".lora_A." in tensor.name and len(tensor.shape) == 2:
            rank = tensor.shape[0]
        elif ".lora_B." in tensor.name and len(tensor.shape) == 2:
            rank = tensor.shape[1]
            pairs += 1
        else:
            raise InvalidAdapterError(f"{WEIGHTS}: {tensor.name} is no LoRA matrix")
        if rank > max_rank:
            raise InvalidAdapterError(f"{WEIGHTS}: {tensor.name} has rank {rank} over {max_rank}")
    if pairs == 0:
        raise InvalidAdapterError(f"{WEIGHTS}: holds no LoRA matrices")
