"""Make an adapter folder immutable, and give it a version and a name.

Files and rows cannot change in one transaction. First the files are made read-only, synced and
hashed (`seal`), which takes long and needs no lock. Then, under the store's write lock, the folder
is renamed to its final place under its digest (`place`), and the row is added (`register`). A crash
before the row leaves a folder without one; it is never served, and the next publication of the same
files replaces it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from learner.adapter_folder import CARD, LINEAGE, file_digest, folder_digest
from learner.records import Candidate
from sidecar.store.models import AdapterRow, AuditRow

ACTOR = "learner"
VERSIONS = 10**9
"""A version is smaller than this: a larger one is damage."""


def find_published(session: Session, model: str, digest: str) -> Candidate | None:
    """Return the version with this digest, or None."""
    row = session.scalar(
        select(AdapterRow).where(AdapterRow.model == model, AdapterRow.digest == digest)
    )
    return _candidate(row) if row is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A finished folder: read-only files, synced to disk."""

    folder: Path
    digest: str
    lineage_sha256: str
    card_sha256: str


def seal(folder: Path) -> Sealed:
    """Make a finished folder's files read-only, sync them to disk, and hash them.

    It takes as long as the disk needs: call it without the store's write lock.
    Raises: OSError when the disk refuses.
    """
    for path in folder.iterdir():
        path.chmod(0o444)
        _sync(path)
    _sync(folder)
    return Sealed(
        folder=folder,
        digest=folder_digest(folder),
        lineage_sha256=file_digest(folder / LINEAGE),
        card_sha256=file_digest(folder / CARD),
    )


def place(sealed: Sealed, adapters_dir: Path) -> Path:
    """Move a sealed folder to `<adapters_dir>/<digest>`, atomically.

    The folder must be on the same file system as `adapters_dir`, and no row may refer to its digest
    yet (`find_published`): a folder already at the target is an orphan and is replaced.
    Returns: the absolute path. Raises: OSError when the disk refuses.
    """
    folder, target = sealed.folder, adapters_dir.resolve() / sealed.digest
    if target.exists():
        remove_folder(target)
    folder.rename(target)
    target.chmod(0o555)
    _sync(target.parent)
    return target


def register(
    session: Session,
    *,
    model: str,
    parent: str,
    run_id: str | None,
    sealed: Sealed,
    path: Path,
    now: float,
    actor: str = ACTOR,
    reason: str = "",
) -> Candidate:
    """Add the next version of the model, in the caller's write transaction.

    run_id: None: no run made it. actor, reason: for the audit; by default the run's.
    """
    # Without a damaged row, whose text or huge number has no successor.
    of_model = (AdapterRow.model == model, AdapterRow.version < VERSIONS)
    newest = session.scalar(select(func.max(AdapterRow.version)).where(*of_model))
    version = (newest or 0) + 1
    digest = sealed.digest
    continued = session.get(AdapterRow, parent)
    row = AdapterRow(
        name=f"{model}--v{version}-{digest[:12]}",
        model=model,
        version=version,
        digest=digest,
        path=str(path),
        parent=parent,
        run_id=run_id,
        state="registered",
        created_at=now,
        # What its parent learned from is in its weights too.
        forgotten_at=None if continued is None else continued.forgotten_at,
    )
    session.add(row)
    session.add(
        AuditRow(
            at=now,
            actor=actor,
            action="adapter.registered",
            subject=row.name,
            before={},
            after={
                "state": "registered",
                "digest": digest,
                "lineage_sha256": sealed.lineage_sha256,
                "card_sha256": sealed.card_sha256,
            },
            reason=reason or f"trained by run {run_id} from {parent}",
        )
    )
    session.flush()
    return _candidate(row)


def remove_folder(folder: Path) -> None:
    """Delete an adapter folder, read-only or not. Raises: OSError."""
    folder.chmod(0o755)
    shutil.rmtree(folder)


def _candidate(row: AdapterRow) -> Candidate:
    return Candidate(
        adapter=row.name,
        parent=row.parent,
        version=row.version,
        digest=row.digest,
        path=Path(row.path),
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
