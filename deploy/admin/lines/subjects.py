"""Whose line of adapters a row of the audit is about."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from sidecar.lines import line_of_adapter, project_of
from sidecar.store.models import AuditRow, CanaryRow

LEARNER = "learner of "
"""How the subject of a project's learner begins (`sidecar.lines.learner_of`)."""


def projects_of(session: Session, rows: Sequence[AuditRow]) -> dict[int, str | None]:
    """Return `seq` -> the project whose line a row is about; None: the default line, or none."""
    ids = {row.subject for row in rows if str(row.action).startswith("canary.")}
    of_canary = CanaryRow.canary_id.in_(ids)
    found = session.execute(select(CanaryRow.canary_id, CanaryRow.model).where(of_canary))
    models = {one.canary_id: one.model for one in found}
    return {row.seq: _project(row, models) for row in rows}


def _project(row: AuditRow, models: dict[str, str]) -> str | None:
    action, subject = str(row.action), str(row.subject)
    if action.startswith("canary."):
        return project_of(str(models.get(subject, "")))
    if action.startswith("adapter."):
        return project_of(line_of_adapter(subject))
    if action == "rollback" or action.startswith("alias."):
        return project_of(subject)
    if action.startswith("learner.") and subject.startswith(LEARNER):
        return subject.removeprefix(LEARNER)
    return None
