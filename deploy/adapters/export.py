"""Write a version as a standard PEFT folder, or as a tar of one, for use elsewhere.

The files are hashed before they are copied, and the copy once more: what is written is what was
registered, or nothing is. A folder appears under its name complete or not at all.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
from pathlib import Path

from sqlalchemy.orm import Session

from deploy.engine.validation import check_digest
from deploy.errors import DeployError, InvalidAdapterError
from deploy.records import AdapterVersion
from deploy.registry import versions
from learner.adapter_folder import (
    CARD,
    CONFIG,
    CURVES,
    DIGESTED,
    LINEAGE,
    OPTIMIZER,
    PROBE,
    WEIGHTS,
    folder_digest,
    manifest_digest,
)
from learner.resume.work_folder import remove_folder, sync
from sidecar.records import BASE

FILES = (CONFIG, WEIGHTS, LINEAGE, CARD, PROBE, CURVES)
"""What is written; the optimiser's moments only when asked for."""
TAR = ".tar"


class ExportError(DeployError, ValueError):
    """The export cannot be written; the message says why, and what to do."""


def version_in_files(session: Session, line: str, reference: str) -> AdapterVersion:
    """Find the version that a person named: a number, an alias or a full name.

    Raises: UnknownAdapterError; ExportError for the base model.
    """
    name = versions.resolve(session, line, reference)
    if name == BASE:
        raise ExportError("the base model is no adapter version; there is nothing to export")
    return versions.find(session, name)


def export_version(
    version: AdapterVersion, target: Path, *, with_optimizer: bool = False
) -> tuple[str, ...]:
    """Write the files of a version to a new folder, or to a new file whose name ends with `.tar`.

    Returns: the names of the files.
    Raises: ExportError; InvalidAdapterError when the folder is not what was registered; OSError.
    """
    if version.removed_at is not None:
        raise ExportError(f"the folder of {version.name} was removed; only its documents are left")
    if target.exists() or target.is_symlink():
        raise ExportError(f"{target}: is there already; name a folder or file that is not")
    if not target.parent.is_dir():
        raise ExportError(f"{target.parent}: no such folder; make it first")
    source = Path(version.path)
    check_digest(source, version.digest)
    wanted = (*FILES, OPTIMIZER) if with_optimizer else FILES
    names = tuple(name for name in wanted if (source / name).is_file())
    unfinished = target.with_name(f".{target.name}.unfinished")
    remove_folder(unfinished)
    try:
        if target.name.endswith(TAR):
            _write_tar(source, unfinished, names)
            found = _tar_digest(unfinished)
        else:
            _write_folder(source, unfinished, names)
            found = folder_digest(unfinished)
        if found != version.digest:
            raise InvalidAdapterError(f"{source}: changed while it was copied; try again")
        unfinished.rename(target)
        sync(target.parent)
    finally:
        remove_folder(unfinished)
    return names


def _write_folder(source: Path, target: Path, names: tuple[str, ...]) -> None:
    target.mkdir()
    for name in names:
        shutil.copyfile(source / name, target / name)
        sync(target / name)
    sync(target)


def _write_tar(source: Path, target: Path, names: tuple[str, ...]) -> None:
    with tarfile.open(target, "x") as archive:
        for name in names:
            entry = archive.gettarinfo(source / name, name)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o644
            with (source / name).open("rb") as file:
                archive.addfile(entry, file)
    sync(target)


def _tar_digest(path: Path) -> str:
    """Return the digest of the folder in a tar, as `learner.adapter_folder` makes it."""
    manifest = []
    with tarfile.open(path) as archive:
        for name in DIGESTED:
            entry = archive.getmember(name)
            file = archive.extractfile(entry)
            if not isinstance(file, io.BufferedReader):
                raise InvalidAdapterError(f"{name}: is not a plain file")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            manifest.append({"path": name, "size": entry.size, "sha256": digest})
    return manifest_digest(manifest)
