"""The admin API's POSTs.

Rollback, abort and pause take no `If-Match` and may be repeated: they must never fail on a race.
Resume, promote and the learner's run take the ETag of what the caller saw.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, Body, Header, Response

from deploy import learner_switches, registry, transitions, trials
from deploy.admin_auth import Caller
from deploy.admin_context import AdminContext
from deploy.admin_models import CanaryOut, LearnerOut, ReasonIn, RollbackIn, RollbackOut
from deploy.admin_problems import ConflictError, PreconditionRequiredError, StaleError
from deploy.admin_reads import read_learner
from deploy.errors import EngineError, TransitionError
from deploy.records import Trial
from deploy.rollback import RollbackResult, rollback
from sidecar.records import BASE

log = structlog.get_logger()

WARM_UP_LIMIT_S = 5.0
"""How long a rollback waits for vLLM to load a target that it does not hold."""
NO_REASON = "no reason given"

CanaryAction = Literal["pause", "resume", "promote", "abort"]
IfMatch = Annotated[str | None, Header()]
Reason = Annotated[ReasonIn | None, Body()]


def action_router(context: AdminContext) -> APIRouter:
    """Every POST of `/admin/v1`."""
    router = APIRouter()
    _add_rollback(router, context)
    _add_canary_actions(router, context)
    _add_learner_actions(router, context)
    return router


def _add_rollback(router: APIRouter, context: AdminContext) -> None:
    @router.post("/rollback")
    async def roll_back(
        actor: Caller,
        asked: Annotated[RollbackIn | None, Body()] = None,
    ) -> RollbackOut:
        """Give the traffic back to an older adapter. Takes effect on the next request."""
        wanted = asked or RollbackIn()
        await _warm_up(context, str(wanted.to))
        result = await asyncio.to_thread(_rollback, context, wanted, actor)
        context.on_change()
        log.info(
            "rolled_back",
            before=result.before,
            after=result.after,
            changed=result.changed,
            ended_canary=result.ended_canary,
            actor=actor,
        )
        return RollbackOut.of(result)


def _rollback(context: AdminContext, wanted: RollbackIn, actor: str) -> RollbackResult:
    return rollback(
        context.database,
        context.model,
        to=str(wanted.to),
        reason=wanted.reason or NO_REASON,
        actor=actor,
        now=context.clock(),
    )


async def _warm_up(context: AdminContext, reference: str) -> None:
    """Have vLLM hold the target before anyone is sent to it, if vLLM can be asked at all.

    Raises: InvalidAdapterError when every vLLM refuses it: users sent there would get errors.
    """
    name = await asyncio.to_thread(_resolve, context, reference)
    if name == BASE or name in context.engine.loaded:
        return
    try:
        async with asyncio.timeout(WARM_UP_LIMIT_S):
            await context.fleet.ensure(name)
    except (EngineError, TimeoutError) as error:
        # Not a reason to refuse: the reconcilers load it as soon as vLLM is there.
        log.warning("rollback_target_not_loaded", adapter=name, reason=repr(error))


def _resolve(context: AdminContext, reference: str) -> str:
    with context.database.read() as session:
        name = registry.resolve(session, context.model, reference)
        return name if registry.has_been_champion(session, name) else BASE


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
        """Pause, resume, promote or abort a trial."""
        reason = (body.reason if body is not None else "") or NO_REASON
        trial = _act(context, canary_id, action, reason, actor, if_match)
        context.on_change()
        response.headers["etag"] = trials.etag(trial)
        return CanaryOut.of(trial, context.rules)


def _act(
    context: AdminContext,
    canary_id: str,
    action: CanaryAction,
    reason: str,
    actor: str,
    if_match: str | None,
) -> Trial:
    do = {
        "pause": transitions.pause,
        "resume": transitions.resume,
        "promote": transitions.promote,
        "abort": transitions.abort,
    }[action]
    with context.database.write() as session:
        row = trials.find_row(session, canary_id)
        before = trials.to_trial(row)
        if action in ("resume", "promote"):
            _check_match(if_match, trials.etag(before))
        try:
            return do(session, row, reason=reason, now=context.clock(), actor=actor)
        except TransitionError as error:
            raise ConflictError(str(error), transitions.allowed_actions(before)) from error


def _add_learner_actions(router: APIRouter, context: AdminContext) -> None:
    @router.post("/learner/{action}")
    def switch(
        action: learner_switches.Action,
        response: Response,
        actor: Caller,
        body: Reason = None,
        if_match: IfMatch = None,
    ) -> LearnerOut:
        """Pause or resume the learner, or have it run now. The ETag comes from GET /learner."""
        reason = (body.reason if body is not None else "") or NO_REASON
        with context.database.write() as session:
            switches = learner_switches.read(session)
            if action != "pause":
                _check_match(if_match, switches.etag)
            if action == "run" and switches.paused:
                raise ConflictError(
                    "the learner is paused", learner_switches.allowed_actions(switches)
                )
            after = learner_switches.switch(
                session, action, now=context.clock(), actor=actor, reason=reason
            )
            response.headers["etag"] = after.etag
            return read_learner(session, context.model)


def _check_match(if_match: str | None, etag: str) -> None:
    if if_match is None:
        raise PreconditionRequiredError("send If-Match with the ETag of the GET that you act on")
    tags = {tag.strip() for tag in if_match.split(",")}
    if "*" not in tags and etag not in tags:
        raise StaleError(f"it is {etag} now, not {if_match}; GET it again and decide anew")
