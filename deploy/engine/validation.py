"""Is this folder an adapter that our vLLM can serve? Asked before it is loaded anywhere.

Reads files only, the digest first: what is not what was registered is not parsed. It is strict
about what vLLM does not do (DoRA, biases, saved modules), about what could run code or poison
every reply (pickles, infinities), and about files that nobody digested. It is silent about
quality: that is the gate's.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.engine import strict_json
from deploy.engine.adapter_config import LoraShape, check_config
from deploy.engine.base_modules import read_base
from deploy.engine.lora_weights import check_against_base, check_matrices, read_matrices
from deploy.engine.safetensors_file import first_non_finite, read_tensors
from deploy.engine.strict_json import shown
from deploy.errors import AlteredAdapterError, InvalidAdapterError
from learner.adapter_folder import (
    CARD,
    CONFIG,
    LINEAGE,
    WEIGHTS,
    Mark,
    folder_marks,
    open_file,
    open_folder,
    read_state,
)

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz"})
KNOWN_FILES = frozenset({CONFIG, WEIGHTS, LINEAGE, CARD})
"""Any other file was not digested, and a later vLLM may read it (a tokenizer, embeddings)."""
MAX_CONFIG_BYTES = 256 * 2**10
_FOLDERS_FAULT = frozenset(
    {
        errno.EACCES,
        errno.EFBIG,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EPERM,
    }
)
"""Errors of a folder. Others (EIO, too many open files) are the machine's, and may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What the serving vLLM takes."""

    max_rank: int
    bases: frozenset[str]
    """Names by which an adapter may call the served base; empty: any."""
    base_model_path: str = ""
    """Folder or hub name of the base weights; empty: modules are not compared with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What the registry recorded when the adapter was published."""

    digest: str
    documents: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 hex of the lineage and the card, by file name, where they were recorded."""


def validate_folder(path: Path, registered: Registered, limits: ServingLimits) -> None:
    """Raises: InvalidAdapterError with the first thing that is wrong, in words; OSError when the
    disk fails, which says nothing of the folder.
    """
    marks = check_digest(path, registered.digest)
    try:
        with open_folder(path) as folder:
            _refuse_foreign_files(folder)
            _check_documents(folder, registered.documents)
            _check_weights(folder, _read_config(folder, limits), limits)
        unchanged = folder_marks(path) == marks
    except OSError as error:
        raise _translated(path, error) from error
    if not unchanged:
        raise AlteredAdapterError(f"{path}: the folder changed while it was validated")


def check_digest(path: Path, digest: str) -> tuple[Mark, ...]:
    """Compare the bytes in a folder with those that were registered.

    Returns: the folder's marks, by which a later change shows (`folder_marks`).
    Raises: AlteredAdapterError when they differ, InvalidAdapterError when the folder holds no such
        files, OSError when the disk fails.
    """
    if not path.is_absolute():
        # vLLM would take a relative path that does not exist for a name of the hub, and fetch it.
        raise InvalidAdapterError(f"{shown(str(path))}: is no absolute path")
    try:
        state = read_state(path)
    except OSError as error:
        raise _translated(path, error) from error
    if state.digest != digest:
        raise AlteredAdapterError(
            f"digest is {state.digest[:12]}, the registry says {digest[:12]}: the folder was "
            "changed"
        )
    return state.marks


def _translated(path: Path, error: OSError) -> Exception:
    if error.errno not in _FOLDERS_FAULT:
        return error
    name = error.filename if isinstance(error.filename, str) else str(path)
    # What was registered is never a link: somebody put it there.
    kind = AlteredAdapterError if error.errno == errno.ELOOP else InvalidAdapterError
    return kind(f"{_plain(name)}: cannot be read ({error.strerror})")


def _plain(text: str) -> str:
    """As it is, if a database and a terminal can take it."""
    return text if text.isprintable() else shown(text)


def _refuse_foreign_files(folder: int) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _plain(entry.name)
            if not entry.is_file(follow_symlinks=False):
                raise InvalidAdapterError(f"{name}: is not a plain file")
            if Path(entry.name).suffix.lower() in PICKLE_SUFFIXES:
                raise InvalidAdapterError(
                    f"{name}: could run code when it is read; weights must be safetensors"
                )
            if entry.name not in KNOWN_FILES:
                raise InvalidAdapterError(
                    f"{name}: does not belong here; an adapter folder holds {CONFIG}, {WEIGHTS}, "
                    f"{LINEAGE} and {CARD}"
                )


def _check_documents(folder: int, documents: Mapping[str, str]) -> None:
    """vLLM does not read them; people and audits do."""
    for name, digest in documents.items():
        with open_file(folder, name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise AlteredAdapterError(f"{name}: was changed after it was registered")


def _read_config(folder: int, limits: ServingLimits) -> LoraShape:
    with open_file(folder, CONFIG) as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise InvalidAdapterError(f"{CONFIG}: has more than {MAX_CONFIG_BYTES} bytes")
    try:
        config = strict_json.parse(content)
    except ValueError as error:
        raise InvalidAdapterError(f"{CONFIG}: {error}") from error
    return check_config(config, max_rank=limits.max_rank, bases=limits.bases)


def _check_weights(folder: int, shape: LoraShape, limits: ServingLimits) -> None:
    with open_file(folder, WEIGHTS) as file:
        tensors = read_tensors(file, WEIGHTS)
        modules = read_matrices(tensors)
        check_matrices(modules, shape, max_rank=limits.max_rank)
        if limits.base_model_path:
            base = read_base(limits.base_model_path, modules)
            if base is not None:
                check_against_base(modules, base)
        bad = first_non_finite(file, tensors)
    if bad is not None:
        raise InvalidAdapterError(f"{WEIGHTS}: {bad} holds an infinity or NaN")
