"""Give the traffic back to the newest champion that did not learn from what is forgotten."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.forgetting.rows import ACTOR
from deploy.registry import canaries, versions
from deploy.registry.rollback import RollbackResult, rollback
from sidecar.records import BASE
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, CanaryRow

REASON = "it learned from content that was forgotten"


def retire(
    database: Database, model: str, *, now: float
) -> tuple[RollbackResult | None, list[str]]:
    """Take every marked adapter out of the traffic, and out of what a rollback chooses by itself.

    Returns: the rollback, None when no marked adapter has traffic; and the adapters that it passed
        over because their folder is not here.
    """
    without: list[str] = []
    with database.read() as session:
        target = champion = versions.champion(session, model)
        if _is_marked(session, champion):
            target, without = _newest_sound(session, model)
        active = canaries.active_row(session, model)
        needed = target != champion or (
            active is not None and _is_marked(session, active.candidate)
        )
    done = None
    if needed:
        done = rollback(
            database, model, to=target, reason=REASON, actor=ACTOR, now=now, pause_learner=False
        )
    with database.write() as session:
        _retire_waiting(session, model)
        if _is_marked(session, versions.aliases_of(session, model).get("previous", BASE)):
            versions.move_alias(
                session,
                model=model,
                alias="previous",
                to=versions.champion(session, model),
                now=now,
                actor=ACTOR,
                reason=REASON,
            )
    return done, without


def _is_marked(session: Session, name: str) -> bool:
    row = session.get(AdapterRow, name) if name != BASE else None
    return row is not None and row.forgotten_at is not None


def _newest_sound(session: Session, model: str) -> tuple[str, list[str]]:
    """The adapter that was promoted last of those that are not marked, or "base". One that was
    rolled back since was taken out for a reason of its own, and one without its folder, which may
    be deleted after a time, cannot be loaded.

    Returns: it, and what is newer but has no folder here.
    """
    promoted = (
        select(AdapterRow.name, AdapterRow.path)
        .join(CanaryRow, AdapterRow.name == CanaryRow.candidate)
        .where(
            CanaryRow.model == model,
            CanaryRow.state == "promoted",
            AdapterRow.forgotten_at.is_(None),
            AdapterRow.removed_at.is_(None),
            AdapterRow.state.not_in(("rolled_back", "rejected")),
        )
        .order_by(CanaryRow.created_at.desc())
    )
    without: list[str] = []
    for name, path in session.execute(promoted):
        if Path(path).is_dir():
            return name, without
        without.append(name)
    return BASE, without


def _retire_waiting(session: Session, model: str) -> None:
    for version in versions.versions(session, model, state="registered"):
        if version.forgotten_at is not None:
            versions.set_state(session, version.name, "retired", REASON)
