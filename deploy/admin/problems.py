"""Every error of the admin API as RFC 9457 `application/problem+json`."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from deploy.admin.auth import ForbiddenError, TooLargeError, TooSlowError, UnauthorizedError
from deploy.admin.out import Problem
from deploy.admin.paging import BadCursorError, BadQueryError, UnknownValueError
from deploy.admin.wire import MEDIA_TYPE, ScopeError, UnreadableError, allowed_methods
from deploy.errors import (
    DamagedRecordError,
    DeployError,
    EngineError,
    TransitionError,
    UnknownAdapterError,
    UnknownCanaryError,
    UnknownProjectError,
    UnknownRecordError,
)
from sidecar.errors import StoreError

log = structlog.get_logger()

TYPE_PREFIX = "urn:learning-sidecar:problem:"


class PreconditionRequiredError(DeployError):
    """The change requires `If-Match`."""


class BlankReasonError(DeployError, ValueError):
    """The reason is there and says nothing."""


class StaleError(DeployError):
    """The resource has changed since the caller read its ETag."""


class TooManyStreamsError(DeployError):
    """As many streams of events are open as may be."""


class ConflictError(DeployError):
    """The state does not allow the action; `allowed_actions` lists what it allows."""

    def __init__(self, detail: str, allowed_actions: Sequence[str]) -> None:
        super().__init__(detail)
        self.allowed_actions = list(allowed_actions)


_KINDS: dict[type[Exception], tuple[int, str, str]] = {
    UnreadableError: (400, "unreadable", "The request cannot be read"),
    UnauthorizedError: (401, "unauthorized", "A valid token is required"),
    ForbiddenError: (403, "forbidden", "This origin is not allowed"),
    ScopeError: (403, "no-scope", "The token lacks a scope"),
    UnknownAdapterError: (404, "unknown-adapter", "No such adapter"),
    UnknownCanaryError: (404, "unknown-canary", "No such canary"),
    UnknownProjectError: (404, "unknown-project", "No such line of adapters"),
    UnknownRecordError: (404, "unknown-record", "No such record"),
    ConflictError: (409, "not-allowed-now", "Not allowed in this state"),
    TransitionError: (409, "not-allowed-now", "Not allowed in this state"),
    TooSlowError: (408, "too-slow", "The body arrived too slowly"),
    StaleError: (412, "stale", "The resource has changed meanwhile"),
    TooLargeError: (413, "too-large", "The body is too large"),
    BadCursorError: (400, "bad-cursor", "Bad cursor"),
    UnknownValueError: (400, "unknown-value", "No such value"),
    BadQueryError: (400, "bad-query", "Bad query parameters"),
    BlankReasonError: (400, "blank-reason", "The reason is blank"),
    PreconditionRequiredError: (428, "if-match-needed", "If-Match is required"),
    DamagedRecordError: (500, "damaged-record", "The stored record is damaged"),
    EngineError: (502, "engine-away", "vLLM cannot be reached"),
    TooManyStreamsError: (503, "too-many-streams", "Too many streams are open"),
    StoreError: (503, "store-away", "The store cannot be reached"),
}
EITHER = frozenset({"constrained-str", "constrained-int"})
"""How pydantic calls the kinds of a value that may be a name or a number
(`deploy.admin.changes.VersionRef`), in the place of an error."""
WANTED = "is no version; send its number, or a name of at most 255 characters"
_BY_STATUS = {404: "no-such-path", 405: "no-such-method", 422: "bad-request"}


def install(app: FastAPI) -> None:
    """Answer every error of this app with a problem."""
    for kind in _KINDS:
        app.add_exception_handler(kind, _on_known)
    app.add_exception_handler(ScopeError, _on_scope)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unknown)


def problem(
    path: str,
    *,
    status: int,
    slug: str,
    title: str,
    detail: str,
    allowed_actions: Sequence[str] = (),
) -> JSONResponse:
    """Build the reply for a problem."""
    body = Problem(
        type=TYPE_PREFIX + slug,
        title=title,
        status=status,
        detail=detail,
        instance=path,
        allowed_actions=list(allowed_actions),
    )
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(
        body.model_dump(), status_code=status, media_type=MEDIA_TYPE, headers=headers
    )


def kind_of(error: Exception) -> tuple[int, str, str]:
    """Return status, slug and title of a known error."""
    return next(_KINDS[one] for one in type(error).__mro__ if one in _KINDS)


def refusal(path: str, error: Exception) -> JSONResponse:
    """Build the reply for a known error. path: the request's path, decoded."""
    status, slug, title = kind_of(error)
    allowed: Sequence[str] = getattr(error, "allowed_actions", ())
    return problem(
        path, status=status, slug=slug, title=title, detail=str(error), allowed_actions=allowed
    )


async def _on_known(request: Request, error: Exception) -> JSONResponse:
    return refusal(_path(request), error)


async def _on_scope(request: Request, error: Exception) -> JSONResponse:
    request.scope["refusals"].note("no_scope", request.scope)
    return refusal(_path(request), error)


async def _on_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if request.method not in allowed_methods(_path(request)):  # `evidence` is no action
        return await _on_http(request, HTTPException(405, "Method Not Allowed"))
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    said = str(first["msg"])
    if place[-1] in EITHER:
        place, said = place[:-1], WANTED
    return problem(
        _path(request),
        status=422,
        slug="bad-request",
        title="The request cannot be read",
        detail=f"{'.'.join(place)}: {said}",
    )


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    reply = problem(
        _path(request),
        status=error.status_code,
        slug=_BY_STATUS.get(error.status_code, "http"),
        title=str(error.detail),
        detail=f"{request.method} {_path(request)}",
    )
    if error.status_code == 405:  # the framework names the methods of one route of the path only
        reply.headers["allow"] = ", ".join(allowed_methods(_path(request)))
    return reply


async def _on_unknown(request: Request, error: Exception) -> JSONResponse:
    log.error("admin_request_failed", path=_path(request), error=repr(error))
    return problem(
        _path(request),
        status=500,
        slug="internal",
        title="The admin API failed",
        detail="see the log of the control process",
    )


def _path(request: Request) -> str:
    # Not `request.url.path`: the URL is built from the Host header, which may be no host name.
    return str(request.scope["path"])
