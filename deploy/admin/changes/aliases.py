"""The aliases of the admin API: where each points, where each pointed at a time, and moving one.

An operator moves `anchor`, and `champion` by the rules of a rollback: to the base or a version that
was champion before, with all that a rollback does. `previous` and `canary` follow from those.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.auth import Caller, caller
from deploy.admin.changes.bodies import ReasonIn, VersionRef
from deploy.admin.changes.conditions import IfMatch, check_match, not_blank
from deploy.admin.changes.targets import may_be_named
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
from deploy.registry.history import bans
from deploy.registry.rollback import roll_back_in
from sidecar.records import BASE
from sidecar.routing.table import is_generation
from sidecar.store.models import AliasRow

Alias = Literal["anchor", "canary", "champion", "previous"]
At = Annotated[float | None, Query(ge=0, le=2**53, allow_inf_nan=False)]


class AliasIn(ReasonIn):
    adapter: VersionRef
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
            cursor=lambda row: encode_cursor("aliases", row.alias),
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
            try:
                _move(session, model, name, target, now=now, actor=actor, reason=reason)
            except TransitionError as error:
                raise ConflictError(str(error), _may_hold(session, model, name)) from error
            session.flush()
            found = _read(session, model, name)
        context.on_change()
        response.headers["etag"] = _etag(found)
        return found

    return router


def _move(
    session: Session, model: str, name: str, to: str, *, now: float, actor: str, reason: str
) -> None:
    """Raises: TransitionError."""
    if not versions.has_been_champion(session, to):
        raise TransitionError(f"{to} has never been champion: no canary passed it")
    if name == "champion":
        roll_back_in(session, model, to=to, reason=reason, actor=actor, now=now)
        return
    versions.refuse_removed(session, to)
    if to != BASE and (why := bans.reason_of(session, model, versions.find(session, to).digest)):
        raise TransitionError(f"{to} cannot be what candidates are held to: {why}")
    versions.move_alias(
        session, model=model, alias=name, to=to, now=now, actor=actor, reason=reason
    )


def _may_hold(session: Session, model: str, name: str) -> list[str]:
    """Return what an alias could be pointed at instead."""
    now = [versions.champion(session, model)] if name == "anchor" else []
    return list(dict.fromkeys([*now, *may_be_named(session, model)]))


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
