"""Give the traffic back to the newest champion that did not learn from what is forgotten."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.forgetting.rows import ACTOR
from deploy.registry import canaries, versions
from deploy.registry.rollback import RollbackResult, rollback
from sidecar.records import BASE
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, CanaryRow

REASON = "it learned from content that was forgotten"


def retire(database: Database, model: str, *, now: float) -> RollbackResult | None:
    """Take every marked adapter out of the traffic, and out of what a rollback chooses by itself.

    Returns: the rollback; None when no marked adapter has traffic.
    """
    with database.read() as session:
        champion = versions.champion(session, model)
        target = champion if not _is_marked(session, champion) else _newest_sound(session, model)
        active = canaries.active_row(session, model)
        needed = target != champion or (
            active is not None and _is_marked(session, active.candidate)
        )
    done = None
    if needed:
        done = rollback(database, model, to=target, reason=REASON, actor=ACTOR, now=now)
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
    return done


def _is_marked(session: Session, name: str) -> bool:
    row = session.get(AdapterRow, name) if name != BASE else None
    return row is not None and row.forgotten_at is not None


def _newest_sound(session: Session, model: str) -> str:
    """The adapter that was promoted last of those that are not marked, or "base". One that was
    rolled back since was taken out for a reason of its own."""
    promoted = (
        select(CanaryRow.candidate)
        .join(AdapterRow, AdapterRow.name == CanaryRow.candidate)
        .where(
            CanaryRow.model == model,
            CanaryRow.state == "promoted",
            AdapterRow.forgotten_at.is_(None),
            AdapterRow.state.not_in(("rolled_back", "rejected")),
        )
        .order_by(CanaryRow.created_at.desc())
        .limit(1)
    )
    return session.scalar(promoted) or BASE


def _retire_waiting(session: Session, model: str) -> None:
    for version in versions.versions(session, model, state="registered"):
        if version.forgotten_at is not None:
            versions.set_state(session, version.name, "retired", REASON)
