"""GET of the admin API for what a rollback may go to."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from sqlalchemy.orm import Session

from deploy.admin.auth import caller
from deploy.admin.changes.champions import former
from deploy.admin.context import AdminContext
from deploy.admin.filters import Project, known_query
from deploy.admin.models import Page
from deploy.admin.out import Out
from deploy.admin.wire.scopes import PREFIX


class TargetOut(Out):
    """An adapter version, or "base", that has been champion and is not now."""

    adapter: str
    previous: bool
    """It is the champion before this one: where a rollback without a target goes."""
    rolled_back_at: float | None
    """When it lost its traffic; null: it was replaced, and not taken away."""
    banned: str | None
    """Why its files are banned; null: they are not. A rollback to it lifts the ban."""
    sound: bool
    """False for what was rolled back or is banned: choose it on purpose only."""


MOST_NAMED = 10
"""Adapters that a refusal names."""


def may_be_named(session: Session, model: str) -> list[str]:
    """Return what a refused rollback could go to instead: nothing that was taken away."""
    return [one.adapter for one in former(session, model) if one.sound][:MOST_NAMED]


def target_router(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(caller), Depends(known_query)])

    @router.get("/rollback/targets")
    def targets(project: Project = None) -> Page[TargetOut]:
        """What a rollback may go to; what was rolled back or banned comes last."""
        with context.database.read() as session:
            found = former(session, context.line_of(project))
        return Page(items=[TargetOut.model_validate(one) for one in found])

    return router
