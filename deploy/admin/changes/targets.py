"""GET of the admin API for what a rollback may go to."""

from __future__ import annotations

from fastapi import APIRouter, Depends

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


def target_router(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(caller), Depends(known_query)])

    @router.get("/rollback/targets")
    def targets(project: Project = None) -> Page[TargetOut]:
        """What a rollback may go to; what was rolled back or banned comes last."""
        with context.database.read() as session:
            found = former(session, context.line_of(project))
        return Page(items=[TargetOut.model_validate(one) for one in found])

    return router
