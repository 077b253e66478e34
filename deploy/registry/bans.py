"""Digests that must not come back: the files of an adapter that lost its traffic, or its canary."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.registry import audit
from sidecar.records import BASE
from sidecar.store.database import count
from sidecar.store.models import AdapterRow, BannedDigestRow


def ban(session: Session, name: str, *, now: float, actor: str, reason: str) -> bool:
    """Ban the digest of a version, in the caller's transaction.

    Returns: False, with nothing written, when it is banned, when the version has no row, and for
    the base. A rollback must not fail because of it.
    """
    row = session.get(AdapterRow, name) if name != BASE else None
    if row is None or find(session, row.model, row.digest) is not None:
        return False
    session.add(
        BannedDigestRow(
            model=row.model, digest=row.digest, adapter=name, at=now, actor=actor, reason=reason
        )
    )
    count(session, "adapter", "banned")
    audit.record(
        session,
        now=now,
        actor=actor,
        action="adapter.banned",
        subject=name,
        before={"banned": False},
        after={"banned": True, "digest": row.digest},
        reason=reason,
    )
    return True


def lift(session: Session, name: str, *, now: float, actor: str, reason: str) -> bool:
    """End the ban of a version's digest, and the version's state `rolled_back`: it is `retired`
    then, so that what descends from it may be tried again too.

    Returns: False when there was nothing to end.
    """
    row = session.get(AdapterRow, name) if name != BASE else None
    banned = find(session, row.model, row.digest) if row is not None else None
    if row is None or (banned is None and row.state != "rolled_back"):
        return False
    before = {"banned": banned is not None, "digest": row.digest, "state": row.state}
    if banned is not None:
        before["why"] = banned.reason
        session.delete(banned)
    if row.state == "rolled_back":
        row.state, row.reason = "retired", f"allowed again: {reason}"
    session.flush()
    audit.record(
        session,
        now=now,
        actor=actor,
        action="adapter.allowed",
        subject=name,
        before=before,
        after={"banned": False, "state": row.state},
        reason=reason,
    )
    return True


def find(session: Session, model: str, digest: str) -> BannedDigestRow | None:
    return session.get(BannedDigestRow, (model, digest))


def reasons(session: Session, model: str) -> dict[str, str]:
    """Return digest -> why it is banned."""
    rows = session.scalars(select(BannedDigestRow).where(BannedDigestRow.model == model))
    return {row.digest: row.reason for row in rows}


def banned_ancestor(session: Session, names: list[str]) -> str | None:
    """Return the first of these versions whose digest is banned."""
    for name in names:
        row = session.get(AdapterRow, name)
        if row is not None and find(session, row.model, row.digest) is not None:
            return name
    return None


def refuse(session: Session, model: str, digest: str) -> None:
    """Raises: TransitionError when the digest is banned."""
    why = reason_of(session, model, digest)
    if why is not None:
        raise TransitionError(why)


def reason_of(session: Session, model: str, digest: str) -> str | None:
    """Return why a digest is banned and how the ban is lifted; None when it is not banned."""
    found = find(session, model, digest)
    if found is None:
        return None
    return (
        f"these files are banned: {found.adapter} ({found.reason}); "
        f"`sidecar adapters allow {found.adapter}` lifts the ban"
    )
