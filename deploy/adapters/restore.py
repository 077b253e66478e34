"""Put the folder of a version back that retention removed, from a copy of its weights.

The weights come from the copy, and are the registered ones: their digest says so. The documents
come from `removed/<digest>/`, where retention keeps them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sqlalchemy import update
from sqlalchemy.orm import Session

from deploy.adapters.prune import removed_documents
from deploy.registry import audit
from learner.adapter_folder import DIGESTED
from learner.records import Candidate
from learner.runs.publish import Sealed, place
from sidecar.store.database import count
from sidecar.store.models import AdapterRow

ACTOR = "sidecar adapters import"


def with_documents(work: Path, adapters_dir: Path, digest: str) -> None:
    """Copy the kept documents of a removed version into a folder. Raises: OSError."""
    kept = removed_documents(adapters_dir, digest)
    for document in sorted(kept.iterdir()) if kept.is_dir() else ():
        if document.name not in DIGESTED:
            shutil.copyfile(document, work / document.name)


def put_back(
    session: Session, known: Candidate, sealed: Sealed, adapters_dir: Path, *, now: float
) -> bool:
    """Place a folder for the versions with its digest, in the caller's write transaction.

    Returns: False, with nothing done, when their folder was not removed. Raises: OSError.
    """
    row = session.get_one(AdapterRow, known.adapter)
    if row.removed_at is None:
        return False
    path = place(sealed, adapters_dir)
    for name in session.scalars(
        update(AdapterRow)
        .where(AdapterRow.digest == sealed.digest)
        .values(removed_at=None, path=str(path))
        .returning(AdapterRow.name)
        .execution_options(synchronize_session="fetch")
    ).all():
        audit.record(
            session,
            now=now,
            actor=ACTOR,
            action="adapter.restored",
            subject=name,
            before={"folder": None},
            after={"folder": str(path)},
            reason="its weights were imported again",
        )
    count(session, "adapter", "restored")
    return True
