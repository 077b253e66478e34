"""Put the status page in front of the admin API, on one listener: the API has its paths, the page
has the others."""

from __future__ import annotations

from typing import Final

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.admin.app import create_app
from deploy.admin.context import AdminContext
from deploy.page.changing import Watchers, changing_views
from deploy.page.overview import overview_views, record_views
from deploy.page.sessions import PageServer, prefix_of, with_headers
from sidecar.settings.kinds import AdminScope

log = structlog.get_logger()

_API: Final = ("/admin", "/healthz", "/readyz", "/metrics")
_KEEP: Final = "public, max-age=31536000, immutable"
"""Static files are named with the digest of their content."""

PAGES: Final[tuple[tuple[str, str, str, AdminScope | None], ...]] = (
    ("GET", "/", "whole", "read"),
    ("GET", "/live", "live", "read"),
    ("GET", "/changed", "changed", "read"),
    ("POST", "/seen", "seen", "read"),
    ("GET", "/canaries", "canaries", "read"),
    ("GET", "/canaries/{canary_id}", "canary", "read"),
    ("POST", "/canaries/{canary_id}/{action}", "steer_canary", "operate"),
    ("GET", "/funnel", "funnel", "read"),
    ("GET", "/groups", "groups", "read"),
    ("GET", "/groups/{group_id}", "group", "content"),
    ("GET", "/runs", "runs", "read"),
    ("GET", "/runs/{run_id}", "run", "read"),
    ("POST", "/learner/{action}", "learner", "train"),
    ("GET", "/adapters", "adapters", "read"),
    ("GET", "/audit", "audit", "read"),
    ("GET", "/rollback", "rollback_form", "operate"),
    ("POST", "/rollback", "roll_back", "operate"),
    ("GET", "/rollback/last", "last", "read"),
    ("GET", "/login", "login", None),
    ("POST", "/login", "log_in", None),
    ("POST", "/logout", "log_out", None),
)
"""Method, path, view, and the scope without which it is refused; None: it needs no login.

The pages about the line of a project have the same paths behind `/project/<project>`."""


def with_page(context: AdminContext) -> ASGIApp:
    """Return the application of the admin listener."""
    api = create_app(context)
    page = create_page(api, context)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        own = scope["type"] == "http" and not any(
            path == one or path.startswith(one + "/") for one in _API
        )
        await (page if own else api)(scope, receive, send)

    return app


def create_page(api: ASGIApp, context: AdminContext) -> Starlette:
    """Build the page alone. api: the admin API, which the page asks in its visitors' names."""
    server = PageServer(api, context)
    views = {
        **overview_views(server),
        **record_views(server),
        **changing_views(server),
        "changed": Watchers(context.database).view,
    }

    async def static(request: Request) -> Response:
        found = server.templates.files.get(request.path_params["name"])
        if found is None:
            return server.plain_problem(404, "there is no such file")
        headers = {"cache-control": _KEEP}
        return with_headers(Response(found.content, media_type=found.media_type, headers=headers))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = "no page has this address" if error.status_code == 404 else str(error.detail)
        reply = server.plain_problem(error.status_code, detail)
        for name, value in (error.headers or {}).items():  # of a 405: `Allow`
            reply.headers[name] = value
        return reply

    async def failed(request: Request, error: Exception) -> Response:
        log.error("admin_page_failed", path=request.scope["path"], error=repr(error))
        return server.plain_problem(500, "this page failed; see the log of the control process")

    routes = [
        Route(
            f"{prefix_of(line)}{path}",
            server.page(views[view], needs=scope, line=line),
            methods=[method],
        )
        for line in context.all_lines
        for method, path, view, scope in PAGES
        if line.project is None or scope is not None  # one login is for all lines
    ]
    return Starlette(
        routes=[*routes, Route("/static/{name}", static)],
        exception_handlers={HTTPException: refused, Exception: failed},
    )
