"""Changes of the admin API that name a version: try it in a canary, lift its ban."""

from __future__ import annotations

import structlog
from fastapi import APIRouter, Depends, Response

from deploy.admin.auth import Caller
from deploy.admin.changes.bodies import ReasonIn, VersionRef
from deploy.admin.changes.conditions import not_blank, reason_in
from deploy.admin.context import AdminContext
from deploy.admin.filters import Project, known_query
from deploy.admin.models import AdapterOut, CanaryOut
from deploy.admin.problems import ConflictError
from deploy.admin.wire.scopes import PREFIX
from deploy.errors import TransitionError, UnknownAdapterError
from deploy.registry import canaries, candidates, versions
from deploy.registry.history import bans
from sidecar.records import BASE

log = structlog.get_logger()


class StartIn(ReasonIn):
    version: VersionRef
    """A version, a full name or an alias."""


def begin_router(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(known_query)])
    database = context.database

    @router.post("/canaries", status_code=201)
    def start(
        asked: StartIn, response: Response, actor: Caller, project: Project = None
    ) -> CanaryOut:
        """Try a version in a canary, also one that was tried before and is not banned.

        It makes a new canary, so it takes no If-Match. Asked again while that canary runs or
        waits, it answers with it. While another canary runs, this one is queued, in the place of
        the one that waits (`state` is `queued`)."""
        reason, model = not_blank(asked.reason), context.line_of(project)
        with database.write() as session:
            try:
                canary = candidates.start(
                    session,
                    model,
                    str(asked.version),
                    steps=context.rules.ramp,
                    now=context.clock(),
                    actor=actor,
                    reason=reason,
                )
            except TransitionError as error:
                # What a running canary would allow is no answer: this version may not be tried.
                raise ConflictError(str(error), []) from error
        told = "canary_queued" if canary.phase == "queued" else "canary_began"
        log.info(told, canary=canary.canary_id, candidate=canary.candidate, actor=actor)
        context.on_change()
        response.headers["etag"] = canaries.etag(canary)
        response.headers["location"] = f"{PREFIX}/canaries/{canary.canary_id}"
        return CanaryOut.of(canary, context.rules)

    @router.post("/adapters/{version}/allow")
    def allow(
        version: str, actor: Caller, body: ReasonIn | None = None, project: Project = None
    ) -> AdapterOut:
        """Lift the ban of a version's files. Idempotent, so it takes no If-Match."""
        reason, model = reason_in(body), context.line_of(project)
        with database.write() as session:
            name = versions.resolve(session, model, version)
            if name == BASE:
                raise UnknownAdapterError("the base model is no adapter version")
            bans.lift(session, name, now=context.clock(), actor=actor, reason=reason)
            aliases = versions.aliases_of(session, model)
            banned = bans.reasons(session, model)
            return AdapterOut.of(versions.find(session, name), aliases, context.loaded(), banned)

    return router
