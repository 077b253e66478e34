"""Validate an adapter folder before any load: can our vLLM serve it?

Only files are read, the digest first: files that differ from the registered ones are not parsed.
Refused are features that vLLM does not support (DoRA, biases, saved modules), content that could
run code or spoil every reply (pickles, infinities), and files that the digest does not cover. The
quality of the adapter is the gate's concern.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.engine import lora_weights
from deploy.engine.lora_weights import (
    LoraShape,
    check_against_base,
    check_config,
    check_matrices,
    first_non_finite,
    read_base,
    read_matrices,
    read_tensors,
    shown,
)
from deploy.errors import AlteredAdapterError, InvalidAdapterError, NotAsRegisteredError
from learner.adapter_folder import (
    CARD,
    CONFIG,
    CURVES,
    LINEAGE,
    OPTIMIZER,
    PROBE,
    WEIGHTS,
    Mark,
    folder_marks,
    open_file,
    open_folder,
    read_state,
)

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz"})
KNOWN_FILES = frozenset({CONFIG, WEIGHTS, LINEAGE, CARD, OPTIMIZER, PROBE, CURVES})
"""Files that may stand in the folder. The digest covers no other file, and a later vLLM may read it
(a tokenizer, embeddings)."""
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
"""OS errors caused by the folder. Others (EIO, too many open files) come from the machine and may
pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Limits of the serving vLLM."""

    max_rank: int
    bases: frozenset[str]
    """Names that an adapter may give for the served base model; empty: any."""
    base_model_path: str = ""
    """Folder or Hugging Face Hub name of the base weights; empty: modules are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """Digests that the registry recorded when the adapter was published."""

    digest: str
    documents: Mapping[str, str] = field(default_factory=dict)
    """File name -> SHA-256 (hex) of the lineage and the model card, where recorded."""


def validate_folder(path: Path, registered: Registered, limits: ServingLimits) -> None:
    """Validate an adapter folder.

    Raises: InvalidAdapterError with the first defect; OSError when the disk fails, which is no
        defect of the folder.
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
    """Compare the digest of a folder with the registered one (SHA-256, hex).

    Returns: the folder's marks, which reveal a later change (`folder_marks`).
    Raises: AlteredAdapterError when the digests differ, NotAsRegisteredError when files are
        missing or cannot be opened, OSError when the disk fails.
    """
    if not path.is_absolute():
        # vLLM would download a relative path that does not exist, as a Hugging Face Hub name.
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
    # A registered file is never a symbolic link: somebody replaced it.
    kind = AlteredAdapterError if error.errno == errno.ELOOP else NotAsRegisteredError
    return kind(f"{_plain(name)}: cannot be read ({error.strerror})")


def _plain(text: str) -> str:
    """Return the text unchanged if it is safe for a database and a terminal, else escaped."""
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
                    f"{LINEAGE}, {CARD}, {OPTIMIZER}, {PROBE} and {CURVES}"
                )


def _check_documents(folder: int, documents: Mapping[str, str]) -> None:
    """Check the digests of lineage and card: vLLM does not read them, people and audits do."""
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
        config = lora_weights.parse(content)
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
