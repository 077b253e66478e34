"""Make an adapter folder immutable, and give it a version and a name.

Files and rows cannot change in one transaction. First the files are made read-only, synced and
hashed (`seal`), which takes long and needs no lock. Then, under the store's write lock, the folder
is renamed to its final place under its digest (`place`), and the row is added (`register`). A crash
before the row leaves a folder without one. It is never served; the run that is resumed replaces it,
and where none is, the next run removes it (`unplace`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from learner.adapter_folder import CARD, LINEAGE, file_digest, folder_digest, read_plain
from learner.errors import UnpublishedError
from learner.records import Candidate
from learner.resume import WorkFolder, remove_folder, sync
from sidecar.errors import StoreError
from sidecar.store.models import AdapterRow, AuditRow

log = structlog.get_logger()

T = TypeVar("T")

ACTOR = "learner"
REGISTERED = "adapter.registered"
"""Action of the audit row that a registration writes."""
PUBLISH_S = 600.0
"""How long a finished run asks a store that is locked or away."""
PUBLISH_PAUSE_S = 1.0
VERSIONS = 10**9
"""A version is smaller than this: a larger one is damage, and may have no successor."""


def when_free(
    publish: Callable[[], T], *, run_id: str, files: Path, pause: Callable[[float], object]
) -> T:
    """Publish a finished run, which may have cost hours: ask a store that is locked or away again.

    files: the run's unplaced folder; once it is gone, the attempt had placed it and is not
        repeated. pause: sleeps this many seconds. Raises what stops the run.
    Raises: UnpublishedError after `PUBLISH_S`, and when the store fails behind the placing.
    """
    began = time.monotonic()
    while True:
        try:
            return publish()
        except StoreError as error:
            if not files.exists():
                raise UnpublishedError(
                    f"{error}; the run is trained, and whether it is published is not known: "
                    "nothing is lost, the next start goes on with it if it is not"
                ) from error
            if time.monotonic() - began > PUBLISH_S:
                raise UnpublishedError(
                    f"{error}; the run is trained and not published: nothing is lost, the next one "
                    "goes on with it once the store can be written"
                ) from error
            log.warning("publication_waits", run_id=run_id, error=str(error))
        pause(PUBLISH_PAUSE_S)


def find_published(session: Session, model: str, digest: str) -> Candidate | None:
    """Return the version of a line with this digest, or None. model: name of the line."""
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
    """Make a finished folder's files read-only, sync them to disk, and hash them: slow, so it is
    called without the store's write lock. Raises: OSError."""
    for path in folder.iterdir():
        path.chmod(0o444)
        sync(path)
    sync(folder)
    return _hashed(folder, folder_digest(folder))


def _hashed(folder: Path, digest: str) -> Sealed:
    return Sealed(
        folder=folder,
        digest=digest,
        lineage_sha256=file_digest(folder / LINEAGE),
        card_sha256=file_digest(folder / CARD),
    )


def place(sealed: Sealed, adapters_dir: Path) -> Path:
    """Move a sealed folder to `<adapters_dir>/<digest>`, atomically.

    The folder must be on the same file system as `adapters_dir`, and no row may refer to its digest
    yet (`find_published`): a folder already at the target is an orphan. It is moved out of the way
    (`replaced`), because to delete it takes long, and the write lock is held.
    Returns: the absolute path. Raises: OSError when the disk refuses.
    """
    folder, target = sealed.folder, adapters_dir.resolve() / sealed.digest
    if target.exists():
        target.chmod(0o755)  # a folder that is moved must be writable
        target.rename(replaced(folder))
    folder.rename(target)
    target.chmod(0o555)
    sync(target.parent)
    return target


def place_or_share(session: Session, sealed: Sealed, adapters_dir: Path) -> tuple[Sealed, Path]:
    """Place a folder, or take the one with these weights that another line has registered: `place`
    would take its files from under that row. Returns: what is registered, and its path."""
    held = session.scalar(
        select(AdapterRow.path).where(
            AdapterRow.digest == sealed.digest, AdapterRow.removed_at.is_(None)
        )
    )
    if held is None:
        return sealed, place(sealed, adapters_dir)
    return _hashed(Path(held), sealed.digest), Path(held)


def replaced(folder: Path) -> Path:
    """Return where `place` leaves an orphan; the caller removes it after the transaction."""
    return folder.with_name(f"{folder.name}.replaced")


def unplace(session: Session, work: WorkFolder, adapters_dir: Path) -> None:
    """Remove the folder that a run placed, if it is not registered. In a write transaction, which
    keeps others from placing the same files meanwhile. Raises: OSError."""
    digest = work.placing()
    if digest is None:
        return
    target = adapters_dir.resolve() / digest
    registered = session.scalar(select(AdapterRow.name).where(AdapterRow.digest == digest))
    if registered is None and _made_by(target, work.run_id):
        remove_folder(target)
        log.warning("orphan_removed", folder=str(target), run_id=work.run_id)


def _made_by(folder: Path, run_id: str) -> bool:
    try:
        lineage = json.loads(read_plain(folder / LINEAGE))
    except (OSError, ValueError):
        return False
    return isinstance(lineage, dict) and lineage.get("run_id") == run_id


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
    """Add the next version of a line. run_id: None: no run made it. actor, reason: for the audit;
    by default the run's."""
    of_line = (AdapterRow.model == model, AdapterRow.version < VERSIONS)
    newest = session.scalar(select(func.max(AdapterRow.version)).where(*of_line))
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
            action=REGISTERED,
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


def _candidate(row: AdapterRow) -> Candidate:
    return Candidate(
        adapter=row.name,
        parent=row.parent,
        version=row.version,
        digest=row.digest,
        path=Path(row.path),
    )


def document_digests(session: Session, name: str) -> dict[str, str]:
    """Return SHA-256 digests (hex) of a version's lineage and model card, by file name.

    A file that the registration did not record is absent.
    """
    statement = (
        select(AuditRow.after)
        .where(AuditRow.action == REGISTERED, AuditRow.subject == name)
        .order_by(AuditRow.seq)
    )
    recorded = session.scalars(statement).first() or {}
    keys = {LINEAGE: "lineage_sha256", CARD: "card_sha256"}
    return {file: recorded[key] for file, key in keys.items() if key in recorded}
