"""Read the names and shapes of the base model's linear layers from its checkpoint's headers.

The weights themselves are not read. When the checkpoint is not on this machine, or is not in
safetensors format, the shapes are unknown and no adapter is refused for them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import structlog

from deploy.engine.lora_weights import BaseModules, tail
from deploy.engine.safetensors_file import read_header
from deploy.errors import InvalidAdapterError

log = structlog.get_logger()

MAX_SHARDS = 1_024
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Data types that store one number for one weight, so the stored shape is the layer's shape."""
_ENDINGS = (".weight", ".qweight", ".weight_packed")
"""Suffixes of a layer's weight tensor: unquantised, and in the two usual quantised formats."""


def read_base(base_model_path: str, modules: Collection[str]) -> BaseModules | None:
    """Read the base's shapes of the named modules. Returns: None when its checkpoint is unreadable.

    base_model_path: a folder, or a Hugging Face Hub name, which is looked up in the local cache.
    """
    tails = {tail(module) for module in modules}
    shapes: dict[str, set[tuple[int, ...] | None]] = {}
    kinds: set[str] = set()
    try:
        shards = _shards(base_model_path)
        for shard in shards:
            with shard.open("rb") as file:
                entries, _ = read_header(file, shard.name)
            for name, entry in entries.items():
                module = _module(name)
                if module is None:
                    continue
                kinds.add(module.rpartition(".")[2])
                if tail(module) in tails:
                    shapes.setdefault(tail(module), set()).add(_shape(name, entry))
    except (OSError, InvalidAdapterError) as error:
        log.warning("base_not_readable", base_model=base_model_path, reason=str(error))
        return None
    return BaseModules(shapes=shapes, kinds=kinds) if shards else None


def _shards(base_model_path: str) -> list[Path]:
    folder = Path(base_model_path) if base_model_path else None
    if folder is not None and not folder.is_dir():
        folder = _in_hub_cache(base_model_path)
    shards = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if not shards:
        log.info("base_not_readable", base_model=base_model_path, reason="no safetensors there")
    return shards[:MAX_SHARDS]


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise OSError(f"is neither a folder nor a Hugging Face Hub name: {error}") from error
    return Path(found).parent if isinstance(found, str) else None


def _module(name: str) -> str | None:
    ending = next((one for one in _ENDINGS if name.endswith(one)), None)
    return None if ending is None else name.removesuffix(ending)


def _shape(name: str, entry: Any) -> tuple[int, ...] | None:  # Any: JSON of a header
    plain = isinstance(entry, dict) and entry.get("dtype") in _PLAIN and name.endswith(".weight")
    return tuple(entry["shape"]) if plain and isinstance(entry.get("shape"), list) else None
