"""What operators change through the admin API: aliases, rollbacks, canaries and bans.

An operator moves `anchor`, and `champion` by the rules of a rollback: to the base or a version that
was champion before, with all that a rollback does. `previous` and `canary` follow from those.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, Header, Query, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.admin.auth import Caller
from deploy.admin.context import AdminContext
from deploy.admin.models import AdapterOut, CanaryOut, Page
from deploy.admin.out import AliasOut, Out
from deploy.admin.paging import Project, new_router
from deploy.admin.problems import (
    BlankReasonError,
    ConflictError,
    PreconditionRequiredError,
    StaleError,
)
from deploy.admin.records import adapter_in, adapter_out, naming, page_of
from deploy.admin.wire import PREFIX
from deploy.errors import TransitionError
from deploy.records import MAX_REASON, cut_reason
from deploy.registry import aliases as history, bans, canaries, candidates, versions
from deploy.registry.rollback import RollbackResult, roll_back_in
from sidecar.records import BASE
from sidecar.routing.table import is_generation
from sidecar.store.models import AdapterRow, AliasEventRow, AliasRow, BannedDigestRow

# Bodies of the changes that operators ask for, and of a rollback's reply.

NO_REASON = "no reason given"
VersionRef = Annotated[str, Field(max_length=255)] | Annotated[int, Field(ge=0)]
"""The number of a version, or a name of one. What is neither is told in words (`problems`)."""


class ReasonIn(BaseModel):
    # Strict: `true` is not a version, and a number is not a reason.
    model_config = ConfigDict(extra="forbid", strict=True)

    # A blank one is a problem of its own (`not_blank`): the pattern is for the description alone.
    reason: str = Field(
        default=NO_REASON, max_length=MAX_REASON, json_schema_extra={"pattern": r"\S"}
    )


class RollbackIn(ReasonIn):
    # A rollback is never refused for what somebody pasted: of a longer reason the rest is left out.
    reason: Annotated[str, AfterValidator(cut_reason)] = Field(
        default=NO_REASON, json_schema_extra={"pattern": r"\S"}
    )
    to: VersionRef = "previous"
    """"previous", "base", a version or a full name."""


class RollbackOut(Out):
    model_config = ConfigDict(populate_by_name=True)

    source: str = Field(alias="from")
    """Adapter that was champion before, or "base"."""
    to: str
    changed: bool
    """False when the target was champion already."""
    ended_canary: str | None
    banned: list[str]
    """Versions whose files this rollback banned: the old champion, and a candidate that users had
    met. One that was still loading or at the gate is not among them."""
    learner_paused: bool
    """The learner is paused, by this rollback or before it; POST /learner/resume ends that."""
    generation: int
    """Generation of the routing table, which every proxy applies at its next poll."""
    note: str | None
    """Says who answers until vLLM has loaded the target, or that nothing changed; else null."""

    @classmethod
    def of(cls, result: RollbackResult, note: str | None) -> RollbackOut:
        return cls.of_record(
            result, source=result.before, to=result.after, banned=list(result.banned), note=note
        )


# Versions that have been champion: what a rollback may go to, and what became of each.

MOVES = 1_000
"""Newest moves of `champion` that are looked through."""
MOST = 100
"""Versions that are listed."""


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


def former(session: Session, model: str) -> list[TargetOut]:
    """List what a rollback may go to: the previous champion, earlier ones, the base, and last what
    was rolled back or banned; the newest first in each."""
    aliases = versions.aliases_of(session, model)
    champion, previous = aliases.get("champion", BASE), aliases.get("previous", BASE)
    left = _left_at(session, model)
    found = (
        _former(session, name, left.get(name), previous=name == previous)
        for name in dict.fromkeys([previous, *left])
        if name not in (champion, BASE)
    )
    known = list(islice((one for one in found if one is not None), MOST))  # asks for no more rows
    if champion != BASE:
        first = previous == BASE
        base = TargetOut(adapter=BASE, previous=first, rolled_back_at=None, banned=None, sound=True)
        known.append(base)
    return sorted(known, key=lambda one: (not one.sound, not one.previous, one.adapter == BASE))


def _left_at(session: Session, model: str) -> dict[str, float]:
    """Return when each champion stopped being it: adapter -> Unix seconds, the newest first."""
    moves = session.execute(
        select(AliasEventRow.before, AliasEventRow.at)
        .where(AliasEventRow.model == model, AliasEventRow.alias == "champion")
        .order_by(AliasEventRow.seq.desc())
        .limit(MOVES)
    )
    left: dict[str, float] = {}
    for name, at in moves:
        if isinstance(name, str):
            left.setdefault(name, at)
    return left


def _former(
    session: Session, name: str, left_at: float | None, *, previous: bool
) -> TargetOut | None:
    row = session.get(AdapterRow, name)
    if row is None or row.removed_at is not None or not versions.has_been_champion(session, name):
        return None
    ban: BannedDigestRow | None = bans.find(session, row.model, row.digest)
    lost = row.state == "rolled_back" or ban is not None
    at = (left_at or 0.0) if ban is None else ban.at
    return TargetOut(
        adapter=name,
        previous=previous,
        rolled_back_at=at if lost else None,
        banned=None if ban is None else ban.reason,
        sound=not lost,
    )


# What a change requires beside its body: the ETag of what the caller saw, and a reason that says
# something.

IfMatch = Annotated[str | None, Header()]


def check_match(if_match: str | None, etag: str) -> None:
    """Raises: PreconditionRequiredError, StaleError."""
    if if_match is None:
        raise PreconditionRequiredError("send If-Match with the ETag of the resource's GET")
    tags = {tag.strip() for tag in if_match.split(",")}
    if "*" not in tags and etag not in tags:
        raise StaleError(f"the ETag is {etag} now, not {if_match}; GET it again, then decide")


def reason_in(body: ReasonIn | None) -> str:
    """Raises: BlankReasonError."""
    return NO_REASON if body is None else not_blank(body.reason)


def not_blank(reason: str) -> str:
    """Raises: BlankReasonError, because the audit would not say why."""
    if not reason.strip():
        raise BlankReasonError("reason: is blank; say why, or leave it out")
    return reason


# Changes of the admin API that name a version: try it in a canary, lift its ban.

log = structlog.get_logger()


class StartIn(ReasonIn):
    version: VersionRef
    """A version, a full name or an alias."""


def change_router(context: AdminContext) -> APIRouter:
    """Return the router of the changes that name a version, and of what they may name."""
    router = new_router()
    _add_begin(router, context)
    _add_aliases(router, context)
    _add_targets(router, context)
    return router


def _add_begin(router: APIRouter, context: AdminContext) -> None:
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
            name = adapter_in(session, model, version)
            bans.lift(session, name, now=context.clock(), actor=actor, reason=reason)
            return adapter_out(session, model, name, context.loaded())


MOST_NAMED = 10
"""Adapters that a refusal names."""


def may_be_named(session: Session, model: str) -> list[str]:
    """Return what a refused rollback could go to instead: nothing that was taken away."""
    return [one.adapter for one in former(session, model) if one.sound][:MOST_NAMED]


def _add_targets(router: APIRouter, context: AdminContext) -> None:
    @router.get("/rollback/targets")
    def targets(project: Project = None) -> Page[TargetOut]:
        """What a rollback may go to; what was rolled back or banned comes last."""
        with context.database.read() as session:
            return Page(items=former(session, context.line_of(project)))


Alias = Literal["anchor", "canary", "champion", "previous"]
At = Annotated[float | None, Query(ge=0, le=2**53, allow_inf_nan=False)]


class AliasIn(ReasonIn):
    adapter: VersionRef
    """"base", a version, a full name or another alias."""


def _add_aliases(router: APIRouter, context: AdminContext) -> None:
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
        return page_of(rows, show=AliasOut.model_validate, name="alias {0.alias}")

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
