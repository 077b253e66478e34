"""The files of an adapter folder and the digest that names it. No torch: deploy reads it too."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LINEAGE = "lineage.json"
CARD = "README.md"

DIGESTED = (CONFIG, WEIGHTS)
"""What vLLM reads. The lineage and the card stay out: they tell of one run (times, ids), and the
same weights learned again must get the same digest. The audit row keeps the lineage's own hash."""


def folder_digest(folder: Path) -> str:
    """SHA-256 hex over the canonical list of (path, size, SHA-256) of the digested files.

    Raises: OSError when one of them is missing or unreadable.
    """
    manifest = [
        {"path": name, "size": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}
        for name in DIGESTED
    ]
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 hex of a file's bytes. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
