"""Write the audit trail: every change of an alias, a canary or the learner, by whom and why.

A row is written in the same transaction as the change, so neither exists without the other. Rows
are only added, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from sidecar.store.models import AuditRow

CONTROL = "control"
"""Actor of the changes that the controller decides by itself."""

SOURCE_CHARACTERS = 64
"""Longest source address that is kept: an IPv6 address with a zone fits."""
REQUEST_CHARACTERS = 64
"""Longest request id that is kept."""
_origin: ContextVar[tuple[str, str]] = ContextVar("audit_origin", default=("", ""))


@contextmanager
def changes_come_from(source: str, request_id: str = "") -> Iterator[None]:
    """Set source address and request id of audit rows written inside, also by threads started
    inside."""
    token = _origin.set((source, request_id))
    try:
        yield
    finally:
        _origin.reset(token)


def record(
    session: Session,
    *,
    now: float,
    actor: str,
    action: str,
    subject: str,
    before: dict[str, Any],
    after: dict[str, Any],
    reason: str,
) -> None:
    """Add one row in the caller's transaction. `before` and `after` hold what changed, as JSON."""
    source, request_id = _origin.get()
    session.add(
        AuditRow(
            at=now,
            actor=actor,
            source=source,
            request_id=request_id,
            action=action,
            subject=subject,
            before=before,
            after=after,
            reason=reason,
        )
    )


def first_reason(session: Session, action: str, subject: str) -> str | None:
    """Return why an action was first taken on a subject; None: the trail does not have it."""
    found = select(AuditRow.reason).where(AuditRow.subject == subject, AuditRow.action == action)
    return session.scalar(found.order_by(AuditRow.seq).limit(1))
