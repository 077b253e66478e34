"""Make an adapter folder immutable, and give it a version and a name.

There are two steps, because files and rows cannot change in one transaction: first the folder moves
to its final place under its digest (written, synced, renamed, read-only), then one transaction adds
the row. A crash in between leaves a folder without a row; it is never served, and the next
publication of the same files replaces it.
"""

from __future__ import annotations

import os
import shutil
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


def seal(folder: Path, adapters_dir: Path) -> tuple[str, Path]:
    """Move a finished folder to `<adapters_dir>/<digest>`, atomically.

    folder: on the same file system as `adapters_dir`; gone afterwards. No row may refer to its
        digest yet (`find_published`): a folder already at the target is an orphan and is replaced.
    Returns: the digest and the absolute path; the files are read-only and synced to disk.
    Raises: OSError when the disk refuses.
    """
    digest = folder_digest(folder)
    target = adapters_dir.resolve() / digest
    for path in folder.iterdir():
        path.chmod(0o444)
        _sync(path)
    _sync(folder)
    if target.exists():
        remove_folder(target)
    folder.rename(target)
    target.chmod(0o555)
    _sync(target.parent)
    return digest, target


def register(
    session: Session, *, model: str, parent: str, run_id: str, digest: str, path: Path, now: float
) -> Candidate:
    """Add the next version of the model, in the caller's write transaction."""
    # Without a damaged row, whose text or huge number has no successor.
    of_model = (AdapterRow.model == model, AdapterRow.version < VERSIONS)
    newest = session.scalar(select(func.max(AdapterRow.version)).where(*of_model))
    version = (newest or 0) + 1
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
    )
    session.add(row)
    session.add(
        AuditRow(
            at=now,
            actor=ACTOR,
            action="adapter.registered",
            subject=row.name,
            before={},
            after={
                "state": "registered",
                "digest": digest,
                "lineage_sha256": file_digest(path / LINEAGE),
                "card_sha256": file_digest(path / CARD),
            },
            reason=f"trained by run {run_id} from {parent}",
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
