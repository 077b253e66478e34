"""The aliases of the admin API: where each points, where each pointed at a time, and moving one.

An operator moves `anchor`, and `champion` by the rules of a rollback: to the base or a version that
was champion before, with all that a rollback does. `previous` and `canary` follow from those.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.auth import Caller, caller
from deploy.admin.changes.bodies import ReasonIn
from deploy.admin.changes.conditions import IfMatch, check_match, not_blank
from deploy.admin.context import AdminContext
from deploy.admin.filters import Project, known_query
from deploy.admin.models import Page
from deploy.admin.out import AliasOut
from deploy.admin.paging import encode_cursor
from deploy.admin.problems import ConflictError
from deploy.admin.records import naming, page_of
from deploy.admin.wire.scopes import PREFIX
from deploy.errors import TransitionError
from deploy.registry import versions
from deploy.registry.history import aliases as history
from deploy.registry.rollback import roll_back_in
from sidecar.routing.table import is_generation
from sidecar.store.models import AliasRow

Alias = Literal["anchor", "canary", "champion", "previous"]
At = Annotated[float | None, Query(ge=0, le=2**53, allow_inf_nan=False)]


class AliasIn(ReasonIn):
    adapter: Annotated[str, Field(max_length=255)] | Annotated[int, Field(ge=0)]
    """"base", a version, a full name or another alias."""


def alias_router(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(caller), Depends(known_query)])
    database = context.database

    @router.get("/aliases")
    def aliases(at: At = None, project: Project = None) -> Page[AliasOut]:
        """Where each alias points; with `at` (Unix seconds), where it pointed at that time."""
        model = context.line_of(project)
        with database.read() as session:
            if at is not None:
                held = history.held_at(session, model, at)
                items = [AliasOut.model_validate(one) for one in held]
                return Page(items=items)
            statement = select(AliasRow).where(AliasRow.model == model).order_by(AliasRow.alias)
            rows = session.scalars(statement).all()
        return page_of(
            rows,
            len(rows),
            show=AliasOut.model_validate,
            name=lambda row: f"alias {row.alias}",
            cursor=lambda row: encode_cursor(row.alias),
        )

    @router.get("/aliases/{name}")
    def alias(name: Alias, response: Response, project: Project = None) -> AliasOut:
        model = context.line_of(project)
        with database.read() as session, naming(f"alias {name}"):
            found = _read(session, model, name)
        response.headers["etag"] = _etag(found)
        return found

    @router.put("/aliases/{name}")
    def put(
        name: Alias,
        asked: AliasIn,
        response: Response,
        actor: Caller,
        if_match: IfMatch = None,
        project: Project = None,
    ) -> AliasOut:
        """Move `anchor`, or `champion` by the rules of a rollback."""
        model = context.line_of(project)
        reason, to, now = not_blank(asked.reason), str(asked.adapter), context.clock()
        if name not in ("anchor", "champion"):
            raise ConflictError(f"{name} follows from the others; nobody moves it by hand", [])
        with database.write() as session:
            check_match(if_match, _etag_in(session, model, name))
            target = versions.resolve(session, model, to)
            if not versions.has_been_champion(session, target):
                raise TransitionError(f"{target} has never been champion: no canary passed it")
            if name == "anchor":
                versions.refuse_removed(session, target)
            if name == "champion":
                roll_back_in(session, model, to=target, reason=reason, actor=actor, now=now)
            else:
                versions.move_alias(
                    session, model=model, alias=name, to=target, now=now, actor=actor, reason=reason
                )
            session.flush()
            found = _read(session, model, name)
        context.on_change()
        response.headers["etag"] = _etag(found)
        return found

    return router


def _read(session: Session, model: str, name: str) -> AliasOut:
    row = session.get(AliasRow, (model, name))
    if row is not None:
        return AliasOut.model_validate(row)
    last = versions.last_generation(session, model, name)
    return AliasOut(alias=name, adapter=None, generation=last)


def _etag_in(session: Session, model: str, name: str) -> str:
    """Return the tag of an alias also where its number is damaged: a move writes it anew."""
    row = session.get(AliasRow, (model, name))
    if row is not None and not is_generation(row.generation):
        return '"g0"'
    return _etag(_read(session, model, name))


def _etag(found: AliasOut) -> str:
    return f'"g{found.generation}"'
