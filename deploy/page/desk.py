"""What every page does around its own work: who asks, may they, and the headers of the reply."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from deploy.admin.auth import ForbiddenError, Grant, RefusedError, TooLargeError, TooSlowError
from deploy.admin.context import AdminContext
from deploy.admin.json import UnreadableError, check_quoted
from deploy.admin.lines.out import LineOut
from deploy.admin.reception import request_id_of, source_of
from deploy.admin.wire.scopes import ScopeError
from deploy.page.ask import Ask, ProblemError
from deploy.page.door import Door, Visitor
from deploy.page.forms import read_form
from deploy.page.rendering import HEADERS, Templates
from sidecar.lines import Line
from sidecar.settings.kinds import AdminScope

log = structlog.get_logger()

FORM_FIELD: Final = "form_token"
NOBODY: Final = Grant("", frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, of a visitor who may ask it."""

    request: Request
    visitor: Visitor
    ask: Ask
    now: float
    line: Line
    """The line of adapters that the page is about."""
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query_params

    def part(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    def link(self, place: str) -> str:
        """Return the address of a page about the same line. place: its path in the default line."""
        return prefix_of(self.line) + place


View = Callable[[Asked], Awaitable[Response]]


class Desk:
    """Shared by all pages."""

    def __init__(self, api: ASGIApp, context: AdminContext) -> None:
        self.context = context
        self.lines = context.lines or (Line(name=context.model),)
        """All lines of adapters, the default one first."""
        self.door = Door(context, context.clock)
        self.templates = Templates()
        self._api = api

    def page(
        self, view: View, *, needs: AdminScope | None, line: Line | None = None
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a page. needs: scope without which it is refused; None: no login is needed.

        line: the line of adapters that it is about; None: the default one.
        """
        of = self.lines[0] if line is None else line

        async def answer(request: Request) -> Response:
            try:
                return await self._answer(view, needs, request, of)
            except (RefusedError, UnreadableError, ScopeError) as error:
                return self._refuse(request, error)

        return answer

    def html(
        self,
        asked: Asked,
        template: str,
        *,
        code: int = 200,
        **values: Any,
    ) -> Response:
        """Render a page for this visitor."""
        text = self.templates.render(
            template,
            {
                "now": asked.now,
                "model": self.context.model,
                "line": asked.line,
                "lines": self.lines,
                "link": asked.link,
                "prefix_of": prefix_of,
                "visitor": asked.visitor,
                "form_token": self.door.form_token(asked.visitor),
                "form_field": FORM_FIELD,
                "asks_for_token": self.door.asks_for_token,
                "path": asked.request.scope["path"].removeprefix(prefix_of(asked.line)) or "/",
                "code": code,
                **values,
            },
        )
        return HTMLResponse(text, status_code=code)

    def tag(self, asked: Asked, template: str, **values: Any) -> str:
        """Name what a part of a page shows, so that an unchanged one is not sent again."""
        shown = self.html(asked, template, tag="", **values)
        return hashlib.sha256(bytes(shown.body)).hexdigest()[:16]

    def ask_as(self, request: Request, grant: Grant, line: Line) -> Ask:
        """The admin API with what this grant may do, about a line of adapters."""
        source = source_of(request.scope)
        given = {"grant": grant, "source": source, "refusals": self.context.refusals}
        return Ask(self._api, given, source, request_id_of(request.scope), line.project)

    async def _answer(
        self, view: View, needs: AdminScope | None, request: Request, line: Line
    ) -> Response:
        check_quoted(request.scope.get("raw_path") or request.scope["path"].encode(), "path")
        check_quoted(request.scope["query_string"], "query")
        visitor = self.door.visitor(request)
        if needs is not None and visitor.grant is None:
            return self._finish(_to_login(request), visitor)
        form: Mapping[str, str] = {}
        if request.method == "POST":
            form = await read_form(request)
            self.door.check_form(visitor, form.get(FORM_FIELD, ""))
        if needs is not None and not visitor.may(needs):
            raise ScopeError(f"your token lacks the scope {needs}, which this needs")
        asked = Asked(
            request=request,
            visitor=visitor,
            ask=self.ask_as(request, visitor.grant or NOBODY, line),
            now=self.context.clock(),
            line=line,
            form=form,
        )
        try:
            response = await view(asked)
        except ProblemError as problem:
            response = self.html(
                asked,
                "problem.html",
                code=problem.status,
                title=problem.title,
                detail=str(problem),
            )
        return self._finish(response, visitor)

    def _finish(self, response: Response, visitor: Visitor) -> Response:
        if visitor.is_new:
            self.door.give_cookie(response, visitor.session)
        return with_headers(response)

    def _refuse(self, request: Request, error: Exception) -> Response:
        reason = "unreadable"
        if isinstance(error, RefusedError):
            reason = error.reason
        elif isinstance(error, ScopeError):
            reason = "no_scope"
        self.context.refusals.note(
            reason,  # type: ignore[arg-type]  # each is a RefusalReason
            source=source_of(request.scope),
            method=request.method,
            path=request.scope["path"],
        )
        status = 400
        for kind, code in (
            (ForbiddenError, 403),
            (ScopeError, 403),
            (TooLargeError, 413),
            (TooSlowError, 408),
        ):
            if isinstance(error, kind):
                status = code
        return self.plain_problem(status, str(error))

    def plain_problem(self, status: int, detail: str) -> Response:
        """A page for somebody who is nobody yet."""
        title = {400: "Unreadable", 403: "Not allowed", 404: "No such page"}.get(status, "Refused")
        text = self.templates.render(
            "refused.html",
            {"now": self.context.clock(), "title": title, "detail": detail, "code": status},
        )
        return with_headers(HTMLResponse(text, status_code=status))


def prefix_of(line: Line | LineOut) -> str:
    """Return what the addresses of the pages about a line begin with; empty: the default line."""
    return "" if line.project is None else f"/project/{line.project}"


def with_headers(response: Response) -> Response:
    for name, value in HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault("cache-control", "no-store")
    return response


def _to_login(request: Request) -> Response:
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"hx-redirect": "/login"})
    if request.method == "POST":
        return Response("log in first", status_code=401, media_type="text/plain")
    return RedirectResponse("/login", status_code=303)
