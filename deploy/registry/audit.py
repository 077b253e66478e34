"""Write the audit trail: every change of an alias, a canary or the learner, by whom and why.

A row is written in the same transaction as the change, so neither exists without the other. Rows
are only added, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from sidecar.lines import line_of_adapter, project_of
from sidecar.store.models import AuditRow, CanaryRow

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


# What a row is about: whose line of adapters, and which adapter a canary tries.

LEARNER = "learner of "
"""How the subject of a project's learner begins (`sidecar.lines.learner_of`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a row is about beside its `subject`, which is an id or a name."""

    project: str | None = None
    """Whose line of adapters; None: the default line, or none."""
    candidate: str | None = None
    """The adapter that the row's canary tries; None: it is about no canary."""


NOTHING = Subject()


def subjects_of(session: Session, rows: Sequence[AuditRow]) -> dict[int, Subject]:
    """Return `seq` -> what the row is about."""
    ids = {row.subject for row in rows if str(row.action).startswith("canary.")}
    found = session.execute(
        select(CanaryRow.canary_id, CanaryRow.model, CanaryRow.candidate).where(
            CanaryRow.canary_id.in_(ids)
        )
    )
    canaries = {
        one.canary_id: Subject(project=project_of(str(one.model)), candidate=str(one.candidate))
        for one in found
    }
    return {row.seq: _subject(row, canaries) for row in rows}


def _subject(row: AuditRow, canaries: dict[str, Subject]) -> Subject:
    action, subject = str(row.action), str(row.subject)
    if action.startswith("canary."):
        return canaries.get(subject, NOTHING)
    if action.startswith("adapter."):
        return Subject(project=project_of(line_of_adapter(subject)))
    if action == "rollback" or action.startswith("alias."):
        return Subject(project=project_of(subject))
    if action.startswith("learner.") and subject.startswith(LEARNER):
        return Subject(project=subject.removeprefix(LEARNER))
    return NOTHING
