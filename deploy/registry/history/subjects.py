"""What a row of the audit is about: whose line of adapters, and which adapter a canary tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from sidecar.lines import line_of_adapter, project_of
from sidecar.store.models import AuditRow, CanaryRow

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
