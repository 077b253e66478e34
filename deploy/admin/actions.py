"""The admin API's POSTs.

Rollback, abort and pause take no `If-Match` and are idempotent: they must never fail on a race.
Resume, promote, skip-step and the learner's run require the ETag of the state that the caller read.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, Body, Response
from pydantic import Field
from sqlalchemy import ColumnElement, and_, select

from deploy.admin.auth import Caller
from deploy.admin.changes import (
    MOST_NAMED,
    NO_REASON,
    IfMatch,
    ReasonIn,
    RollbackIn,
    RollbackOut,
    check_match,
    may_be_named,
    not_blank,
    reason_in,
)
from deploy.admin.context import AdminContext
from deploy.admin.models import CanaryOut, LearnerOut
from deploy.admin.out import Out
from deploy.admin.paging import OfProject, Project, new_router
from deploy.admin.problems import ConflictError
from deploy.admin.records import naming, read_learner
from deploy.admin.wire import UnreadableError
from deploy.engine.reconcile import EngineView
from deploy.engine.validation import check_digest
from deploy.errors import InvalidAdapterError, TransitionError, UnknownAdapterError, error_line
from deploy.records import Canary, short
from deploy.registry import audit, canaries, switches as learner_switches, transitions, versions
from deploy.registry.rollback import rollback
from ingest.store.groups import CLAIMED, SAMPLED, SCORED, SET_ASIDE, retry_judging
from learner.runs.source import TRAINED
from sidecar.errors import StoreError
from sidecar.hiding import hide_in_url
from sidecar.records import BASE
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, ExchangeRow, GroupRow

log = structlog.get_logger()

CanaryAction = Literal["pause", "resume", "promote", "abort", "skip-step"]
LearnerAction = Literal["pause", "resume", "run", "override"]
Reason = Annotated[ReasonIn | None, Body()]
GIVEN_UP = re.compile("judge_[a-z_]+|verifier_failed")
"""Reasons for which judging sets a group aside whose answers are complete and readable."""
MOST_GROUPS = 500
"""Groups of one call, which is one transaction."""


class RetryIn(ReasonIn):
    """Groups by id, or the newest `MOST_GROUPS` that judging set aside for one reason."""

    groups: list[Annotated[str, Field(max_length=64)]] = Field(default=[], max_length=MOST_GROUPS)
    of_reason: str | None = Field(default=None, pattern=f"^({GIVEN_UP.pattern})$")


class RetryOut(Out):
    retried: list[str]
    """Groups that wait for the judge again."""
    unchanged: list[str]
    """Groups that wait for the judge or have scores already."""
    refused: dict[str, str]
    """Any other group -> why it stays as it is."""


def action_router(context: AdminContext) -> APIRouter:
    """Return the router of every POST of `/admin/v1`."""
    router = new_router()
    _add_rollback(router, context)
    _add_canary_actions(router, context)
    _add_learner_actions(router, context)
    _add_retry(router, context)
    return router


def _add_rollback(router: APIRouter, context: AdminContext) -> None:
    @router.post("/rollback")
    def roll_back(
        actor: Caller,
        asked: Annotated[RollbackIn | None, Body()] = None,
        project: Project = None,
    ) -> RollbackOut:
        """Give the traffic back to an older adapter. Takes effect on the next request.

        The routing table changes at once and does not wait for vLLM: control loads the target
        afterwards, and until then the base answers in its place, as `note` says.
        """
        wanted, line = asked or RollbackIn(), context.line_of(project)
        try:
            result = rollback(
                context.database,
                line,
                to=str(wanted.to),
                reason=not_blank(wanted.reason),
                actor=actor,
                now=context.clock(),
            )
        except TransitionError as error:
            with context.database.read() as session:
                raise ConflictError(str(error), may_be_named(session, line)) from error
        context.on_change()
        note = until_loaded(result.after, context.engine)
        note = with_files(note, context.database, result.after)
        if note is None and not result.changed:
            note = f"nothing to undo: {short(result.after)} was champion already"
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


LIMIT_S = 2.0
"""Time to read the files: a GB is hashed in that, and a disk that hangs must not hold the reply."""


def with_files(note: str | None, database: Database, adapter: str) -> str | None:
    """Add to the note about a target that is not loaded what is wrong with its files here.

    The rollback is in effect by then: only its reply waits for the disk. Folders that another
    machine has are left out. note: None when every vLLM has it loaded: then nothing is read.
    """
    if note is None:
        return None
    try:
        with database.read() as session:
            version = versions.find(session, adapter)
    except (UnknownAdapterError, StoreError):
        return note  # the rollback is made, and its reply must not fail
    found: list[str] = []

    def look() -> None:
        try:
            check_digest(Path(version.path), version.digest)
        except InvalidAdapterError as error:
            found.append(error_line(error))
        except OSError:
            return  # the disk's fault, and no word about the files

    looking = threading.Thread(target=look, name="target-files", daemon=True)
    looking.start()
    looking.join(LIMIT_S)
    if not found or found[0] in note:  # a vLLM was refused it for that, and the note says so
        return note
    return (
        f"{note}; its folder is missing or altered on this machine, and vLLM will not get it so "
        f"({found[0]}): restore {version.path}, or name another version, or base"
    )


def _add_canary_actions(router: APIRouter, context: AdminContext) -> None:
    @router.post("/canaries/{canary_id}/{action}")
    def act(
        canary_id: str,
        action: CanaryAction,
        response: Response,
        actor: Caller,
        body: Reason = None,
        if_match: IfMatch = None,
        project: OfProject = None,
    ) -> CanaryOut:
        """Pause, resume, promote or abort a canary, or skip the step that it is in."""
        reason = reason_in(body)
        canary = _act(context, canary_id, action, reason, actor, if_match, project)
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
    project: str | None,
) -> Canary:
    do = {
        "pause": transitions.pause,
        "resume": transitions.resume,
        "promote": transitions.promote,
        "abort": transitions.abort,
        "skip-step": transitions.skip_step,
    }[action]
    with context.database.write() as session:
        row = context.canary_row(session, canary_id, project)
        before = canaries.to_canary(row)
        if action in ("resume", "promote", "skip-step"):
            check_match(if_match, canaries.etag(before))
        if action == "promote" and reason == NO_REASON:
            reason = f"{NO_REASON}; {unproven(before)}"
        try:
            return do(session, row, reason=reason, now=context.clock(), actor=actor)
        except TransitionError as error:
            raise ConflictError(str(error), transitions.allowed_actions(before)) from error


def unproven(canary: Canary) -> str:
    """Say how far a canary was that is promoted by hand: what the audit can tell without a reason
    of the operator's. Pure."""
    proven = ", ".join(sorted(canary.proven)) or "nothing"
    return (
        f"promoted by hand at step {canary.step + 1} of {len(canary.steps)}; judged groups had "
        f"proven {proven}"
    )


def _add_learner_actions(router: APIRouter, context: AdminContext) -> None:
    @router.post("/learner/{action}")
    def switch(
        action: LearnerAction,
        response: Response,
        actor: Caller,
        body: Reason = None,
        if_match: IfMatch = None,
        project: Project = None,
    ) -> LearnerOut:
        """Pause or resume the learner, request a run now, or let it go on though the reward watch
        holds it (`override`). The ETag comes from GET /learner."""
        reason, line = reason_in(body), context.line_of(project)
        with context.database.write() as session:
            switches = learner_switches.read(session, line)
            if action != "pause":
                check_match(if_match, switches.etag)
            allowed, now = learner_switches.allowed_actions(switches), context.clock()
            if action in ("run", "override") and switches.paused:
                raise ConflictError("the learner is paused", allowed)
            if action == "override":
                try:
                    learner_switches.override(
                        session, line, context.watch, now=now, actor=actor, reason=reason
                    )
                except TransitionError as error:
                    raise ConflictError(str(error), allowed) from error
                session.flush()
            else:
                learner_switches.switch(session, line, action, now=now, actor=actor, reason=reason)
            response.headers["etag"] = learner_switches.read(session, line).etag
            return read_learner(session, line)


def _add_retry(router: APIRouter, context: AdminContext) -> None:
    @router.post("/groups/retry")
    def retry(asked: RetryIn, actor: Caller) -> RetryOut:
        """Give groups that judging set aside back to the judge, at most 500 a call. Idempotent, so
        it takes no If-Match; 409 when every group is refused."""
        reason = not_blank(asked.reason)
        if bool(asked.groups) == (asked.of_reason is not None):
            raise UnreadableError("body: name groups, or one of_reason for all of it")
        wanted: ColumnElement[bool] = GroupRow.group_id.in_(asked.groups)
        if asked.of_reason is not None:
            wanted = and_(GroupRow.status == SET_ASIDE, GroupRow.reason == asked.of_reason)
        found = RetryOut(
            retried=[], unchanged=[], refused=dict.fromkeys(asked.groups, "there is none")
        )
        with context.database.write() as session:
            rows = session.execute(
                select(GroupRow, ExchangeRow.seq, AdapterRow.removed_at, AdapterRow.name)
                .outerjoin(ExchangeRow, ExchangeRow.exchange_id == GroupRow.exchange_id)
                .outerjoin(AdapterRow, AdapterRow.name == GroupRow.adapter)
                .where(wanted)
                .order_by(GroupRow.seq.desc())
                .limit(MOST_GROUPS)
            ).all()
            for row, exchange, removed_at, adapter in rows:
                has_adapter = row.adapter == BASE or (adapter is not None and removed_at is None)
                found.refused.pop(row.group_id, None)
                if why := why_refused(
                    row, has_prompt=exchange is not None, has_adapter=has_adapter
                ):
                    found.refused[row.group_id] = why
                elif row.status == SET_ASIDE and retry_judging(session, row):
                    found.retried.append(row.group_id)
                else:
                    found.unchanged.append(row.group_id)
            if found.retried:
                audit.record(
                    session,
                    now=context.clock(),
                    actor=actor,
                    action="groups.retried",
                    subject=asked.of_reason or found.retried[0],
                    before={},
                    after={"number": len(found.retried), "groups": found.retried[:MOST_NAMED]},
                    reason=reason,
                )
        log.info("groups_retried", groups=len(found.retried), refused=len(found.refused))
        if found.refused and not (found.retried or found.unchanged):
            first, why = next(iter(found.refused.items()))
            more = f", and {len(found.refused) - 1:,} more" if len(found.refused) > 1 else ""
            raise ConflictError(f"no group can be judged again: {first}: {why}{more}", [])
        return found


def why_refused(row: GroupRow, *, has_prompt: bool, has_adapter: bool) -> str:
    """Say why a group cannot go back to the judge; empty when it can, or has been there. Pure."""
    if row.status not in (SAMPLED, SCORED, CLAIMED, TRAINED) and not (
        row.status == SET_ASIDE and GIVEN_UP.fullmatch(row.reason or "")
    ):
        return f"it is {row.status}" + (f": {row.reason}" if row.reason else "")
    if row.status == SET_ASIDE and not has_prompt:
        return "its prompt is not stored any more"
    if row.status == SET_ASIDE and not has_adapter:
        return f"its adapter {row.adapter} does not exist any more"
    return ""
