"""Sessions of the page: cookies, form tokens and origins, who asks and what they may do."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from deploy.admin.auth import (
    ForbiddenError,
    Grant,
    RefusedError,
    UnauthorizedError,
    admit,
    grant_of,
    reason_of,
)
from deploy.admin.context import AdminContext
from deploy.admin.out import LineOut
from deploy.admin.problems import kind_of
from deploy.admin.reception import request_id_of, source_of
from deploy.admin.wire import ScopeError, UnreadableError, check_quoted
from deploy.page.rendering import HEADERS, Ask, ProblemError, Templates, read_form
from sidecar.access.denials import is_other_site
from sidecar.lines import Line
from sidecar.settings.kinds import AdminScope

# Cookies of the page: values that only this process can have made. Pure.

KEY_BYTES = 32
NAME_BYTES = 16
"""Random bytes that name a session."""
SESSION_S = 12 * 3600.0
"""A session ends so long after its login, used or not."""
MOST_BYTES = 1_024
"""No cookie of this page is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    name: str
    """Random; the form tokens are made of it."""
    who: str
    """`reference` of the token that logged in; empty: nobody has."""
    ends_at: float


def reference(key: bytes, token_digest: str) -> str:
    """Name a token in a session without telling its digest."""
    return _mac(key, "who", token_digest)[:32]


def seal(key: bytes, session: Session) -> str:
    """Write a session as the value of a cookie."""
    body = json.dumps([session.name, session.who, session.ends_at]).encode()
    text = base64.urlsafe_b64encode(body).decode().rstrip("=")
    return f"{text}.{_mac(key, 'session', text)}"


def unseal(key: bytes, value: str, now: float) -> Session | None:
    """Read the value of a cookie; None when it was not made with this key, or has ended."""
    text, _, mac = value.partition(".")
    if len(value) > MOST_BYTES or not hmac.compare_digest(_mac(key, "session", text), _ascii(mac)):
        return None
    try:
        name, who, ends_at = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, ValueError):
        return None
    return Session(name=name, who=who, ends_at=ends_at) if ends_at > now else None


def form_token(key: bytes, session: Session) -> str:
    """Return what every form of this session carries: another site cannot know it."""
    return _mac(key, "form", session.name)


def _ascii(text: str) -> str:
    """`compare_digest` refuses other characters, and no digest has them."""
    return text if text.isascii() else ""


def _mac(key: bytes, purpose: str, text: str) -> str:
    message = f"{purpose}\0{text}".encode("utf-8", "surrogatepass")
    return hmac.new(key, message, hashlib.sha256).hexdigest()


# Who looks at the page, and from where: cookies, form tokens, origins.

SESSION: Final = "sidecar_admin_session"
"""Cookie of a login."""
FORM: Final = "sidecar_admin_form"
"""Cookie behind the forms of visitors who are not logged in. A second one: a link from another site
brings no Strict cookie along, and answering it must not end a login."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    grant: Grant | None
    """None: nobody has logged in."""
    session: Session
    is_new: bool
    """The session was made for this request, and goes into a cookie."""

    def may(self, scope: str) -> bool:
        return self.grant is not None and scope in self.grant.scopes


class Logins:
    """Knows the key of this process's cookies."""

    def __init__(self, context: AdminContext, clock: Callable[[], float] = time.time) -> None:
        self._tokens = context.tokens
        self._clock = clock
        self._key = secrets.token_bytes(KEY_BYTES)
        self._grants: dict[str, Grant] = {}
        """What each token may do that has logged in, by its `signing.reference`: the settings do
        not change while this process lives."""
        self._ended: dict[str, float] = {}
        """Name of a session that was logged out -> when it ends anyway."""

    @property
    def asks_for_token(self) -> bool:
        return bool(self._tokens)

    def visitor(self, request: Request) -> Visitor:
        """Raises: ForbiddenError, UnreadableError for a request that no page of ours made."""
        if not self._tokens:
            grant = admit(request.scope["headers"], ())
            return self._anonymous(request, grant)
        if request.method not in ("GET", "HEAD"):
            self._check_origin(request)
        session = self._read(request, SESSION)
        if session is not None and session.name not in self._ended:
            known = self._grants.get(session.who)
            if known is not None:
                return Visitor(grant=known, session=session, is_new=False)
        return self._anonymous(request, None)

    def log_in(self, token: str) -> Session:
        """Raises: UnauthorizedError, also for a token of a project: pages show all of them."""
        given = token.strip().encode("utf-8", "replace")
        grant = grant_of(b"Bearer " + given, self._tokens)
        if grant.projects:
            raise UnauthorizedError("no_scope", "this token is of a project: ask by the command")
        who = reference(self._key, hashlib.sha256(given).hexdigest())
        self._grants[who] = grant
        return self._new(who=who)

    def log_out(self, session: Session) -> None:
        """End a login. A session that nobody logged in to is not remembered: anybody makes one."""
        if not session.who:
            return
        now = self._clock()
        self._ended = {name: ends for name, ends in self._ended.items() if ends > now}
        self._ended[session.name] = session.ends_at

    @property
    def ended(self) -> int:
        """Number of sessions that are remembered because a logout ended them early."""
        return len(self._ended)

    def form_token(self, visitor: Visitor) -> str:
        return form_token(self._key, visitor.session)

    def check_form(self, visitor: Visitor, given: str) -> None:
        """Raises: ForbiddenError when the form is not of this session."""
        own = form_token(self._key, visitor.session)
        if visitor.is_new or not hmac.compare_digest(own, _ascii(given)):
            raise ForbiddenError(
                "foreign_origin", "the form is not of this session; load the page and try again"
            )

    def give_cookie(self, response: Response, session: Session) -> None:
        name = SESSION if session.who else FORM
        response.set_cookie(
            name,
            seal(self._key, session),
            max_age=int(SESSION_S),
            path="/",
            httponly=True,
            samesite="strict",
        )

    def _anonymous(self, request: Request, grant: Grant | None) -> Visitor:
        session = self._read(request, FORM)
        if session is not None and not session.who:
            return Visitor(grant=grant, session=session, is_new=False)
        return Visitor(grant=grant, session=self._new(who=""), is_new=True)

    def _new(self, *, who: str) -> Session:
        name = secrets.token_hex(NAME_BYTES)
        return Session(name=name, who=who, ends_at=self._clock() + SESSION_S)

    def _read(self, request: Request, cookie: str) -> Session | None:
        value = request.cookies.get(cookie)
        return None if value is None else unseal(self._key, value, self._clock())

    @staticmethod
    def _check_origin(request: Request) -> None:
        origin, host = request.headers.get("origin"), request.headers.get("host")
        try:
            other_site = is_other_site(origin, host)
        except ValueError as error:
            raise ForbiddenError("foreign_origin", "the Origin is not a URL") from error
        if other_site:
            raise ForbiddenError("foreign_origin", f"web pages of {origin!r} may not send forms")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise ForbiddenError("foreign_origin", "another site may not send forms")


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


class PageServer:
    """Shared by all pages."""

    def __init__(self, api: ASGIApp, context: AdminContext) -> None:
        self.context = context
        self.logins = Logins(context, context.clock)
        self.templates = Templates()
        self._api = api

    def page(
        self, view: View, *, needs: AdminScope | None, line: Line
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a page. needs: scope without which it is refused; None: no login is needed.

        line: the line of adapters that it is about.
        """

        async def answer(request: Request) -> Response:
            try:
                return await self._answer(view, needs, request, line)
            except (RefusedError, UnreadableError, ScopeError) as error:
                return self._refuse(request, error)

        return answer

    def html(self, asked: Asked, template: str, *, code: int = 200, **values: Any) -> Response:
        """Render a page for this visitor."""
        text = self.templates.render(
            template,
            {
                "now": asked.now,
                "model": self.context.model,
                "line": asked.line,
                "lines": self.context.all_lines,
                "link": asked.link,
                "prefix_of": prefix_of,
                "visitor": asked.visitor,
                "form_token": self.logins.form_token(asked.visitor),
                "form_field": FORM_FIELD,
                "asks_for_token": self.logins.asks_for_token,
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
        visitor = self.logins.visitor(request)
        if needs is not None and visitor.grant is None:
            return self._finish(_to_login(request), visitor)
        form: Mapping[str, str] = {}
        if request.method == "POST":
            form = await read_form(request)
            self.logins.check_form(visitor, form.get(FORM_FIELD, ""))
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
            values = {"title": problem.title, "detail": str(problem)}
            response = self.html(asked, "problem.html", code=problem.status, **values)
        return self._finish(response, visitor)

    def _finish(self, response: Response, visitor: Visitor) -> Response:
        if visitor.is_new:
            self.logins.give_cookie(response, visitor.session)
        return with_headers(response)

    def _refuse(self, request: Request, error: Exception) -> Response:
        self.context.refusals.note(reason_of(error), request.scope)
        return self.plain_problem(kind_of(error)[0], str(error))

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
