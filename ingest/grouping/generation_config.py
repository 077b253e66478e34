"""Read the sampling defaults in the base model's `generation_config.json`.

vLLM applies them to fields that a request leaves out (`--generation-config auto`, its default).
Without that file it takes them from `config.json`, so that is read too. The files are found like
the tokenizer. Files do not show whether this vLLM was started with other flags:
`ingest.vllm.probe` measures it, and `serving.sampling_defaults` states it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ingest.grouping.engine_facts import NEUTRAL

FILES = ("generation_config.json", "config.json")
MAX_BYTES = 2**20
UNREADABLE = (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_defaults(base_model_path: str) -> frozenset[str] | None:
    """Return the fields that the base model's files set to a value that is not neutral.

    Returns: None when that is unknown: no path, no such folder, not in the Hugging Face Hub cache,
        or an unreadable file.
    """
    if not base_model_path:
        return None
    folder = Path(base_model_path)
    is_folder = folder.is_dir()
    for name in FILES:
        path = folder / name if is_folder else _in_hub_cache(base_model_path, name)
        if path is None:
            return None
        if path.is_file():
            return _fields(path)
    return frozenset() if is_folder else None


def _fields(path: Path) -> frozenset[str] | None:
    try:
        with path.open("rb") as file:
            values = msgspec.json.decode(file.read(MAX_BYTES), type=dict[str, Any])
    except UNREADABLE:
        return None
    return frozenset(
        name for name, neutral in NEUTRAL.items() if _is_set(values.get(name), neutral)
    )


def _is_set(value: Any, neutral: tuple[float, ...]) -> bool:  # Any: JSON
    return value is not None and value not in neutral


def _in_hub_cache(name: str, file: str) -> Path | None:
    """Find a file in this machine's Hugging Face Hub cache.

    Returns: a path, which does not exist when the Hub has no such file; None when the cache does
        not know.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    if found is None:
        return None
    return Path(found) if isinstance(found, str) else Path(f"{name}/{file}.not-on-the-hub")
