"""The forms: log in and out, roll back, steer canaries and the learner.

Each is a POST of the admin API in the visitor's name, so the API checks its rights and writes the
audit row; a button that a page did not show is refused all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import RedirectResponse, Response

from deploy.admin.auth import UnauthorizedError
from deploy.admin.changes.bodies import RollbackOut
from deploy.admin.lines.engine import EngineOut
from deploy.admin.models import (
    AuditOut,
    CanaryOut,
    LearnerOut,
    Page,
    StatusOut,
)
from deploy.admin.reception import source_of
from deploy.page.ask import ProblemError
from deploy.page.desk import Asked, Desk, View
from deploy.page.door import SESSION
from deploy.page.first_reply import FirstReply, Took, first_reply, proxies_took
from deploy.page.shown.words import short
from sidecar.errors import StoreError
from sidecar.lines import Line
from sidecar.plurals import counted
from sidecar.records import BASE

PREVIOUS = "previous"
MOST_TARGETS = 200
NEWEST = 200
"""Audit rows that are looked through for the last rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something to roll back to."""

    value: str
    label: str
    loaded: str


def changing_views(desk: Desk) -> dict[str, View]:
    async def login(asked: Asked) -> Response:
        if asked.visitor.grant is not None:
            return RedirectResponse("/", status_code=303)
        return desk.html(asked, "login.html", error="")

    async def log_in(asked: Asked) -> Response:
        try:
            session = desk.door.log_in(asked.form.get("token", ""))
        except UnauthorizedError as error:
            request = asked.request
            desk.context.refusals.note(
                error.reason,
                source=source_of(request.scope),
                method=request.method,
                path=request.scope["path"],
            )
            return desk.html(asked, "login.html", code=401, error="This token is not known.")
        response = RedirectResponse("/", status_code=303)
        desk.door.give_cookie(response, session)
        return response

    async def log_out(asked: Asked) -> Response:
        desk.door.log_out(asked.visitor.session)
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(SESSION, path="/", httponly=True, samesite="strict")
        return response

    async def rollback_form(asked: Asked) -> Response:
        return await _form(desk, asked, error="", code=200)

    async def roll_back(asked: Asked) -> Response:
        reason, to = asked.form.get("reason", ""), asked.form.get("to", PREVIOUS)
        if not reason.strip():
            return await _form(desk, asked, error="Say why: the audit keeps it.", code=422)
        if asked.form.get("confirm") != "yes":
            return await _form(desk, asked, error="Confirm that users shall get it.", code=422)
        done = await asked.ask.post(RollbackOut, "rollback", body={"to": to, "reason": reason})
        if not done.changed:
            return desk.html(asked, "rolled_back.html", done=done)
        return RedirectResponse(asked.link("/rollback/last"), status_code=303)

    async def last(asked: Asked) -> Response:
        """The last rollback, and what has been seen of it; a part of a page when htmx asks."""
        row = await _last_rollback(asked)
        if row is None:
            raise ProblemError(404, "No rollback", "none is among the newest rows of the audit")
        status = await asked.ask.get(StatusOut, "status")
        first, took = await asyncio.to_thread(_measure, desk, asked.line, row)
        part = asked.request.headers.get("hx-request") == "true"
        return desk.html(
            asked,
            "rollback_seen.html" if part else "rolled_back.html",
            done=None,
            row=row,
            first=first,
            took=took,
            engine=status.engine,
        )

    async def canary(asked: Asked) -> Response:
        canary_id, action = asked.part("canary_id"), asked.part("action")
        await asked.ask.post(
            CanaryOut,
            "canaries",
            canary_id,
            action,
            body=_reason(asked),
            if_match=asked.form.get("etag", ""),
        )
        return RedirectResponse(asked.link(f"/canaries/{canary_id}"), status_code=303)

    async def learner(asked: Asked) -> Response:
        await asked.ask.post(
            LearnerOut,
            "learner",
            asked.part("action"),
            body=_reason(asked),
            if_match=asked.form.get("etag", ""),
        )
        return RedirectResponse(asked.link("/runs"), status_code=303)

    return {
        "login": login,
        "log_in": log_in,
        "log_out": log_out,
        "rollback_form": rollback_form,
        "roll_back": roll_back,
        "last": last,
        "canary": canary,
        "learner": learner,
    }


def loaded_words(adapter: str, engine: EngineOut) -> str:
    """`loaded on 2 of 3 replicas`."""
    if adapter == BASE:
        return "always loaded"
    replicas = engine.replicas.values()
    away = sum(one.away is not None for one in replicas)
    has = sum(adapter in one.loaded for one in replicas if one.away is None)
    missing = f", {away} away" if away else ""
    return f"loaded on {has} of {counted(len(engine.replicas), 'replica')}{missing}"


def _reason(asked: Asked) -> dict[str, str]:
    reason = asked.form.get("reason", "")
    return {"reason": reason} if reason else {}


async def _form(desk: Desk, asked: Asked, *, error: str, code: int) -> Response:
    found = await asked.ask.get(StatusOut, "status")
    canaries = await asked.ask.get(Page[CanaryOut], "canaries", limit=MOST_TARGETS)
    return desk.html(
        asked,
        "rollback.html",
        code=code,
        found=found,
        targets=targets(found, canaries.items),
        error=error,
        chosen=asked.form.get("to") or asked.query.get("to", PREVIOUS),
        reason=asked.form.get("reason", ""),
    )


def targets(status: StatusOut, canaries: Sequence[CanaryOut]) -> list[Target]:
    """Return what a rollback may go to: the previous champion, earlier ones, the base."""
    earlier = [one.candidate for one in canaries if one.state == "promoted"]
    found = [] if status.previous == status.champion else [(PREVIOUS, status.previous)]
    found += [(name, name) for name in earlier if name not in (status.champion, status.previous)]
    found.append((BASE, BASE))
    return [
        Target(
            value=value,
            label=short(name) + (", the one before" if value == PREVIOUS else ""),
            loaded=loaded_words(name, status.engine),
        )
        for value, name in found
        if name != status.champion
    ]


async def _last_rollback(asked: Asked) -> AuditOut | None:
    newest = await asked.ask.get(Page[AuditOut], "audit", limit=NEWEST)
    of = asked.line.name
    return next(
        (one for one in newest.items if (one.action, one.subject) == ("rollback", of)), None
    )


def _measure(desk: Desk, line: Line, row: AuditOut) -> tuple[FirstReply | None, list[Took]]:
    """Return what traffic and proxies tell; None and nothing while the store cannot be asked."""
    generation = row.after.get("generation")
    try:
        with desk.context.database.read() as session:
            first = first_reply(
                session,
                line=line,
                to=str(row.after.get("champion")),
                left=str(row.before.get("champion")),
                at=row.at,
            )
            took = proxies_took(
                session,
                model=line.name,
                generation=generation if isinstance(generation, int) else 0,
                at=row.at,
            )
            return first, took
    except StoreError:
        return None, []
