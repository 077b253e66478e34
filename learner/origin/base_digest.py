"""The digests of what a run starts from: a base model's config and weights, a parent's moments.

Hashing them takes as long as reading them, so the hash of each file is kept beside the file's size
and time of change, and a file that has both still is not read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from learner.adapter_folder import OPTIMIZER, file_digest
from learner.records import Parent

log = structlog.get_logger()

PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
"""Files that training depends on. The tokenizer is not among them: groups hold token ids."""
CACHE = "base-digests.json"
"""Name of the file in `state_dir` with the hashes of single files."""

Hashes = Mapping[str, tuple[int, int, str]]
"""Absolute path -> (size in bytes, time of change in ns, SHA-256 hex)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDigest:
    """Which base model it is."""

    digest: str
    """SHA-256 (hex) of the canonical list of (path, size, SHA-256) of its files."""
    revision: str
    """Commit on the Hugging Face Hub; "" for a folder that does not come from there."""


def base_digest(base_model_path: str, cache: Path) -> BaseDigest | None:
    """Hash the base model's files, as far as they have changed since the last time.

    base_model_path: a folder, or a name on the Hugging Face Hub whose files were fetched before.
    cache: a file for the hashes; one that is damaged or cannot be written costs time only (logged).
    Returns: None when the files are not there, or cannot be read (logged): loading will say why.
    """
    folder = _folder(base_model_path)
    files = [] if folder is None else sorted({f for p in PATTERNS for f in folder.glob(p)})
    if folder is None or not files:
        log.info("base_digest_unknown", base=base_model_path, why="its files are not there yet")
        return None
    known, found = _read(cache), {}
    manifest = []
    try:
        for path in files:
            place, of_file = str(path.resolve()), path.stat()
            size, changed = of_file.st_size, of_file.st_mtime_ns
            before = known.get(place)
            digest = before[2] if before and before[:2] == (size, changed) else file_digest(path)
            found[place] = (size, changed, digest)
            manifest.append({"path": path.name, "size": size, "sha256": digest})
    except OSError as error:
        log.warning("base_digest_unknown", base=base_model_path, why=str(error))
        return None
    if any(known.get(place) != one for place, one in found.items()):
        _write(cache, {**{p: one for p, one in known.items() if Path(p).exists()}, **found})
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return BaseDigest(
        digest=hashlib.sha256(canonical.encode()).hexdigest(), revision=_revision(folder)
    )


def moments_digest(parent: Parent) -> str | None:
    """Return the SHA-256 of the moments that a run went on from; None when there were none."""
    path = parent.path / OPTIMIZER if parent.path is not None else None
    return file_digest(path) if path is not None and path.is_file() else None


def _folder(base_model_path: str) -> Path | None:
    if Path(base_model_path).is_dir():
        return Path(base_model_path)
    if not base_model_path:
        return None
    from huggingface_hub import try_to_load_from_cache  # no torch, but slow to import

    try:
        config = try_to_load_from_cache(base_model_path, "config.json")
    except (OSError, ValueError):  # a text that can be no name on the Hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def _revision(folder: Path) -> str:
    return folder.name if folder.parent.name == "snapshots" else ""


def _read(cache: Path) -> Hashes:
    try:
        stored = json.loads(cache.read_text(encoding="utf-8"))
        return {
            str(path): (int(size), int(changed), str(digest))
            for path, (size, changed, digest) in stored.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("base_digests_unreadable", path=str(cache), why=str(error))
        return {}


def _write(cache: Path, hashes: Hashes) -> None:
    unfinished = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(cache)
    except OSError as error:
        log.warning("base_digests_not_kept", path=str(cache), why=str(error))
