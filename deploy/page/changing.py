"""The forms: log in and out, roll back, steer canaries and the learner.

Each is a POST of the admin API in the visitor's name, so the API checks its rights and writes the
audit row; a button that a page did not show is refused all the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.responses import RedirectResponse, Response

from deploy.admin.auth import UnauthorizedError
from deploy.admin.changes import RollbackOut, TargetOut
from deploy.admin.events import Streams, newest_change
from deploy.admin.models import (
    AdapterOut,
    AuditOut,
    CanaryOut,
    EngineOut,
    LearnerOut,
    Page,
    StatusOut,
)
from deploy.page.rendering import FirstReply, ProblemError, Took, first_reply, proxies_took
from deploy.page.sessions import SESSION, Asked, PageServer, View
from deploy.page.text import clock, names_in
from deploy.records import short
from sidecar.errors import StoreError
from sidecar.lines import Line
from sidecar.records import BASE
from sidecar.store.database import Database
from sidecar.visible import counted

PREVIOUS = "previous"
NEWEST = 200
"""Audit rows that are looked through for the last rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something to roll back to."""

    value: str
    label: str
    loaded: str
    taken_away: str = ""
    """Why nobody should take it unawares: when it was rolled back, and that it is banned."""
    banned: bool = False


def changing_views(server: PageServer) -> dict[str, View]:
    async def login(asked: Asked) -> Response:
        if asked.visitor.grant is not None:
            return RedirectResponse("/", status_code=303)
        return server.html(asked, "login.html", error="")

    async def log_in(asked: Asked) -> Response:
        try:
            session = server.logins.log_in(asked.form.get("token", ""))
        except UnauthorizedError as error:
            server.context.refusals.note(error.reason, asked.request.scope)
            await server.context.refusals.slow_down(error.reason)
            known = error.reason == "no_scope"
            why = "is of a project: use the command" if known else "is not known"
            return server.html(asked, "login.html", code=401, error=f"This token {why}.")
        response = RedirectResponse("/", status_code=303)
        server.logins.give_cookie(response, session)
        return response

    async def log_out(asked: Asked) -> Response:
        server.logins.log_out(asked.visitor.session)
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(SESSION, path="/", httponly=True, samesite="strict")
        return response

    async def rollback_form(asked: Asked) -> Response:
        return await _form(server, asked, error="", code=200)

    async def roll_back(asked: Asked) -> Response:
        reason, to = asked.form.get("reason", ""), asked.form.get("to", "").strip()
        error, lifts = "", False
        if not to:
            error = "Choose what to go back to: nothing was chosen, and nothing was changed."
        elif not reason.strip():
            error = "Say why: the audit keeps it."
        elif asked.form.get("confirm") != "yes":
            error = "Confirm that users shall get it."
        elif asked.form.get("lift") != "yes" and await _is_banned(asked, to):
            lifts = True
            error = (
                "This version is banned: it lost its traffic. Confirm below that its ban is lifted."
            )
        if error:
            return await _form(server, asked, error=error, code=422, lifts=lifts)
        done = await asked.ask.post(RollbackOut, "rollback", body={"to": to, "reason": reason})
        if not done.changed:
            return server.html(asked, "rolled_back.html", done=done)
        return RedirectResponse(asked.link("/rollback/last"), status_code=303)

    async def last(asked: Asked) -> Response:
        """The last rollback, and what has been seen of it; a part of a page when htmx asks, and 204
        when that part has not changed."""
        row = await _last_rollback(asked)
        if row is None:
            raise ProblemError(404, "No rollback", "none is among the newest rows of the audit")
        status = await asked.ask.get(StatusOut, "status")
        first, took = await asyncio.to_thread(_measure, server, asked.line, row)
        part = asked.request.headers.get("hx-request") == "true"
        values: dict[str, Any] = {
            "done": None,
            "row": row,
            "banned": names_in(row.after.get("banned")),
            "first": first,
            "took": took,
            "engine": status.engine,
        }
        tag = server.tag(asked, "rollback_seen.html", **values)
        if part and asked.query.get("tag") == tag:
            return Response(status_code=204)
        template = "rollback_seen.html" if part else "rolled_back.html"
        return server.html(asked, template, tag=tag, **values)

    async def steer_canary(asked: Asked) -> Response:
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
        "steer_canary": steer_canary,
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


async def _form(
    server: PageServer, asked: Asked, *, error: str, code: int, lifts: bool = False
) -> Response:
    """lifts: the version that was asked for is banned, also where the list does not have it."""
    found = await asked.ask.get(StatusOut, "status")
    former = await asked.ask.get(Page[TargetOut], "rollback", "targets")
    listed = targets(found, former.items, asked.now)
    chosen = asked.form.get("to") or asked.query.get("to") or default_of(listed)
    return server.html(
        asked,
        "rollback.html",
        code=code,
        found=found,
        targets=listed,
        error=error,
        chosen=chosen if any(one.value == chosen for one in listed) else "",
        undo=any(one.value == PREVIOUS for one in listed),
        asks_lift=lifts or any(one.banned for one in listed),
        reason=asked.form.get("reason", ""),
    )


def targets(status: StatusOut, former: Iterable[TargetOut], now: float) -> list[Target]:
    """Return what the form offers, in the order of the API: what was taken away comes last."""
    found = []
    for one in former:
        marks = []
        if one.rolled_back_at is not None:
            marks.append(f"rolled back {clock(one.rolled_back_at, now)} UTC")
        if one.banned is not None:
            marks.append("banned; choosing it lifts the ban")
        found.append(
            Target(
                value=PREVIOUS if one.previous else one.adapter,
                label=short(one.adapter) + (", the one before" if one.previous else ""),
                loaded=loaded_words(one.adapter, status.engine),
                taken_away=", ".join(marks),
                banned=one.banned is not None,
            )
        )
    return found


def default_of(listed: Iterable[Target]) -> str:
    """Return the target that the form has chosen already: the champion before, if it is sound."""
    return next((one.value for one in listed if (one.value, one.taken_away) == (PREVIOUS, "")), "")


async def _is_banned(asked: Asked, to: str) -> bool:
    """Return True when a rollback to it would lift a ban. The API refuses what it does not know."""
    if to == BASE:
        return False
    try:
        return (await asked.ask.get(AdapterOut, "adapters", to)).banned is not None
    except ProblemError as problem:
        if problem.status == 404:
            return False
        raise


async def _last_rollback(asked: Asked) -> AuditOut | None:
    newest = await asked.ask.get(Page[AuditOut], "audit", limit=NEWEST)
    of = asked.line.name
    return next(
        (one for one in newest.items if (one.action, one.subject) == ("rollback", of)), None
    )


def _measure(server: PageServer, line: Line, row: AuditOut) -> tuple[FirstReply | None, list[Took]]:
    """Return what traffic and proxies tell; None and nothing while the store cannot be asked."""
    generation = row.after.get("generation")
    try:
        with server.context.database.read() as session:
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


# `GET /changed`: tell an open page at once that something changed, as server-sent events.

POLL_S = 1.0
"""Time between two looks at the audit. A look reads one row by its primary key."""
MAX_S = 60.0
"""Longest time of one stream. The browser then connects again, and its login is checked again."""
MAX_STREAMS = 40
"""Pages that are told at once. Further ones only ask every 5 s."""


class Watchers:
    """Streams of the pages that are open at one control."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._streams = Streams()

    async def view(self, asked: Asked) -> Response:
        """Open a stream of what comes after `after`, a `seq`, or after what the browser saw last.

        204 ends the attempts of a browser: too many are open.
        """
        if asked.request.method == "HEAD" or self._streams.open >= MAX_STREAMS:
            return Response(status_code=204)
        seen = _seq(asked.request.headers.get("last-event-id", ""))
        if seen is None:
            seen = _seq(asked.query.get("after", ""))
        return self._streams.begin(self._stream(seen or 0))

    async def _stream(self, seen: int) -> AsyncIterator[str]:
        """seen: `seq` of the newest change that the page shows."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + MAX_S
        yield "retry: 2000\n\n"
        while True:
            try:
                newest = await asyncio.to_thread(newest_change, self._database)
            except StoreError as error:  # the browser connects again
                yield f": the store is away: {type(error).__name__}\n\n"
                return
            if newest > seen:
                seen = newest
                yield f"id: {newest}\nevent: changed\ndata: {newest}\n\n"
            if loop.time() >= ends:
                return
            await asyncio.sleep(min(POLL_S, max(0.0, ends - loop.time())))


def _seq(text: str) -> int | None:
    """Read a `seq` that a browser sent; None when it is none."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
