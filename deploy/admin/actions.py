"""The admin API's POSTs.

Rollback, abort and pause take no `If-Match` and are idempotent: they must never fail on a race.
Resume, promote and the learner's run require the ETag of the state that the caller read.
"""

from __future__ import annotations

from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, Body, Depends, Header, Response

from deploy.admin.auth import Caller
from deploy.admin.changes.bodies import NO_REASON, ReasonIn, RollbackIn, RollbackOut
from deploy.admin.context import AdminContext
from deploy.admin.filters import known_query
from deploy.admin.models import CanaryOut, LearnerOut
from deploy.admin.problems import (
    BlankReasonError,
    ConflictError,
    PreconditionRequiredError,
    StaleError,
)
from deploy.admin.reads import read_learner
from deploy.admin.records import naming
from deploy.admin.wire.scopes import PREFIX
from deploy.engine.reconcile import EngineView
from deploy.errors import TransitionError
from deploy.records import Canary
from deploy.registry import canaries, transitions
from deploy.registry.learner import switches as learner_switches
from deploy.registry.rollback import rollback
from sidecar.hiding import hide_in_url
from sidecar.records import BASE

log = structlog.get_logger()

CanaryAction = Literal["pause", "resume", "promote", "abort"]
LearnerAction = Literal["pause", "resume", "run", "override"]
IfMatch = Annotated[str | None, Header()]
Reason = Annotated[ReasonIn | None, Body()]


def action_router(context: AdminContext) -> APIRouter:
    """Return the router of every POST of `/admin/v1`."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(known_query)])
    _add_rollback(router, context)
    _add_canary_actions(router, context)
    _add_learner_actions(router, context)
    return router


def _add_rollback(router: APIRouter, context: AdminContext) -> None:
    @router.post("/rollback")
    def roll_back(
        actor: Caller,
        asked: Annotated[RollbackIn | None, Body()] = None,
    ) -> RollbackOut:
        """Give the traffic back to an older adapter. Takes effect on the next request.

        The routing table changes at once and does not wait for vLLM: control loads the target
        afterwards, and until then the base answers in its place, as `note` says.
        """
        wanted = asked or RollbackIn()
        result = rollback(
            context.database,
            context.model,
            to=str(wanted.to),
            reason=_not_blank(wanted.reason),
            actor=actor,
            now=context.clock(),
        )
        context.on_change()
        note = until_loaded(result.after, context.engine)
        log.info(
            "rolled_back",
            before=result.before,
            after=result.after,
            changed=result.changed,
            ended_canary=result.ended_canary,
            actor=actor,
            note=note,
        )
        return RollbackOut.of(result, note)


def _reason_in(body: ReasonIn | None) -> str:
    return NO_REASON if body is None else _not_blank(body.reason)


def _not_blank(reason: str) -> str:
    """Raises: BlankReasonError, because the audit would not say why."""
    if not reason.strip():
        raise BlankReasonError("reason: is blank; say why, or leave it out")
    return reason


def until_loaded(adapter: str, engine: EngineView) -> str | None:
    """Say who answers the users of a champion that vLLM has not loaded yet. Pure.

    engine: the latest view of every replica.
    Returns: None when every replica has it loaded.
    """
    lacking = [url for url, view in engine.replicas.items() if adapter not in view.loaded]
    if adapter == BASE or not lacking:
        return None
    where = ", ".join(hide_in_url(url) for url in lacking)
    nowhere = len(lacking) == len(engine.replicas)
    stands_in = "the base answers" if nowhere else "the other replicas answer"
    refused = engine.refused.get(adapter)
    advice = f"; vLLM refused it ({refused}): name another version, or base" if refused else ""
    return f"{adapter} is not loaded on {where}: {stands_in} until it is{advice}"


def _add_canary_actions(router: APIRouter, context: AdminContext) -> None:
    @router.post("/canaries/{canary_id}/{action}")
    def act(
        canary_id: str,
        action: CanaryAction,
        response: Response,
        actor: Caller,
        body: Reason = None,
        if_match: IfMatch = None,
    ) -> CanaryOut:
        """Pause, resume, promote or abort a canary."""
        reason = _reason_in(body)
        canary = _act(context, canary_id, action, reason, actor, if_match)
        context.on_change()
        response.headers["etag"] = canaries.etag(canary)
        with naming(f"canary {canary_id}"):
            return CanaryOut.of(canary, context.rules)


def _act(
    context: AdminContext,
    canary_id: str,
    action: CanaryAction,
    reason: str,
    actor: str,
    if_match: str | None,
) -> Canary:
    do = {
        "pause": transitions.pause,
        "resume": transitions.resume,
        "promote": transitions.promote,
        "abort": transitions.abort,
    }[action]
    with context.database.write() as session:
        row = canaries.find_row(session, canary_id)
        before = canaries.to_canary(row)
        if action in ("resume", "promote"):
            _check_match(if_match, canaries.etag(before))
        try:
            return do(session, row, reason=reason, now=context.clock(), actor=actor)
        except TransitionError as error:
            raise ConflictError(str(error), transitions.allowed_actions(before)) from error


def _add_learner_actions(router: APIRouter, context: AdminContext) -> None:
    @router.post("/learner/{action}")
    def switch(
        action: LearnerAction,
        response: Response,
        actor: Caller,
        body: Reason = None,
        if_match: IfMatch = None,
    ) -> LearnerOut:
        """Pause or resume the learner, request a run now, or let it go on though the reward watch
        holds it (`override`). The ETag comes from GET /learner."""
        reason = _reason_in(body)
        with context.database.write() as session:
            switches = learner_switches.read(session)
            if action != "pause":
                _check_match(if_match, switches.etag)
            if action in ("run", "override") and switches.paused:
                raise ConflictError(
                    "the learner is paused", learner_switches.allowed_actions(switches)
                )
            if action == "override":
                try:
                    learner_switches.override(
                        session,
                        context.model,
                        context.watch,
                        now=context.clock(),
                        actor=actor,
                        reason=reason,
                    )
                except TransitionError as error:
                    allowed = learner_switches.allowed_actions(switches)
                    raise ConflictError(str(error), allowed) from error
                session.flush()
            else:
                learner_switches.switch(
                    session, action, now=context.clock(), actor=actor, reason=reason
                )
            response.headers["etag"] = learner_switches.read(session).etag
            return read_learner(session, context.model)


def _check_match(if_match: str | None, etag: str) -> None:
    if if_match is None:
        raise PreconditionRequiredError("send If-Match with the ETag of the resource's GET")
    tags = {tag.strip() for tag in if_match.split(",")}
    if "*" not in tags and etag not in tags:
        raise StaleError(f"the ETag is {etag} now, not {if_match}; GET it again, then decide")
