"""Authenticate callers of the admin API. Pure: `reception` calls it before it reads a body.

With tokens configured (`<SHA-256 hex>` or `<SHA-256 hex>:<scope>+<scope>`) a caller must send one
of them as a bearer token. It has the scopes named there; a digest alone has every scope. With
`@<project>+<project>` behind the scopes it may ask what takes `?project=`, for these alone.
Without tokens the listener is loopback only (the settings refuse anything else), and every local
process may call. A web page in a local browser may not: requests with a foreign `Origin`, or with a
`Host` that is not a loopback name (DNS rebinding), are refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from fastapi import Depends, Request

from deploy.admin.wire import (
    EVERY_SCOPE,
    OF_ALL,
    ScopeError,
    UnreadableError,
    check_scope,
    scopes_of,
)
from deploy.errors import DeployError
from sidecar.access.denials import host_name, is_other_site
from sidecar.settings.kinds import AdminScope, is_loopback

LOCAL = "local"
"""Actor in the audit when no token is configured."""

RefusalReason = Literal[
    "no_token", "unknown_token", "foreign_host", "foreign_origin", "unreadable", "too_large",
    "too_slow", "no_scope",
]  # fmt: skip
"""Reasons to refuse a request before its route runs; label values of
`sidecar_admin_refused_total`."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Who calls, and what the caller may do."""

    name: str
    """For the audit: the start of the token's digest, or `local`."""
    scopes: frozenset[AdminScope]
    projects: frozenset[str] = frozenset()
    """Whose lines of adapters alone it may ask about; empty: everything."""
    others: tuple[Grant, ...] = ()
    """Of a digest that is listed again: each allows a request by itself."""


class RefusedError(DeployError):
    """The request is refused before routing. `reason` labels the metric and the log event."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: RefusalReason = reason


def reason_of(error: Exception) -> RefusalReason:
    """Return why a request is refused with this error."""
    if isinstance(error, RefusedError):
        return error.reason
    return "no_scope" if isinstance(error, ScopeError) else "unreadable"


class UnauthorizedError(RefusedError, PermissionError):
    """The request has no valid bearer token."""


class ForbiddenError(RefusedError, PermissionError):
    """The request comes from a web page, or its Host is not a loopback name."""


class TooLargeError(RefusedError):
    """The body exceeds `MAX_BODY_BYTES`."""


class TooSlowError(RefusedError, TimeoutError):
    """The body did not arrive in time."""


def admit(headers: Iterable[tuple[bytes, bytes]], tokens: Collection[str]) -> Grant:
    """Authenticate a request by its headers.

    headers: (name, value) pairs with lower-case names, as in ASGI. tokens: as `admin.tokens`.
    Raises: UnreadableError, UnauthorizedError, ForbiddenError.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (b"host", b"origin", b"authorization") and name in found:
            raise UnreadableError(f"header {name.decode()}: occurs twice; send it once")
        found[name] = value
    host, origin = _text(found, b"host"), _text(found, b"origin")
    asked_host = _host_name(host)
    try:
        other_site = is_other_site(origin, host)
    except ValueError as error:
        raise UnreadableError("header origin: is not a URL") from error
    if tokens:
        return grant_of(found.get(b"authorization"), tokens)
    if not is_loopback(asked_host):
        raise ForbiddenError(
            "foreign_host",
            f"Host {host!r} is not this machine; without admin.tokens use 127.0.0.1",
        )
    if other_site:
        raise ForbiddenError("foreign_origin", f"web pages of {origin!r} may not use the admin API")
    return Grant(LOCAL, EVERY_SCOPE)


def grant_of(authorization: bytes | None, tokens: Collection[str]) -> Grant:
    """Check the `Authorization` header. tokens: as `admin.tokens`. Raises: UnauthorizedError."""
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip():
        raise UnauthorizedError("no_token", "send `Authorization: Bearer <token>`")
    digest = hashlib.sha256(token.strip()).hexdigest()
    known = [one.partition(":") for one in tokens]
    # Every digest is compared, in constant time: timing shows neither the match nor its length.
    matches = [hmac.compare_digest(digest.encode(), one.lower().encode()) for one, _, _ in known]
    if not any(matches):
        raise UnauthorizedError(
            "unknown_token", "unknown token; admin.tokens lists the digests of valid ones"
        )
    entries = [words for (_, _, words), found in zip(known, matches, strict=True) if found]
    return _grant(f"token:{digest[:8]}", entries)


def _grant(name: str, entries: Iterable[str]) -> Grant:
    """Return what the entries of a digest allow, first what holds for everything.

    Scopes for everything add up. Those for projects do not: an entry's are for its projects alone.
    """
    everywhere, of_projects = list[frozenset[AdminScope]](), list[Grant]()
    for words in entries:
        named, at, projects = words.partition("@")
        scopes = scopes_of(cast(list[AdminScope], named.split("+"))) if named else EVERY_SCOPE
        if at:
            of_projects.append(Grant(name, scopes, frozenset(projects.split("+"))))
        else:
            everywhere.append(scopes)
    whole = [Grant(name, frozenset[AdminScope]().union(*everywhere))] if everywhere else []
    first, *others = (*whole, *of_projects)
    return replace(first, others=tuple(others))


async def allowed(request: Request) -> None:
    """Check the caller's scopes and projects: a dependency of every route. Raises: ScopeError.

    The request goes on with the one grant that allows it.
    """
    grant: Grant | None = request.scope.get("grant")
    *before, last = (None,) if grant is None else (grant, *grant.others)
    for one in before:
        with suppress(ScopeError):
            _check(request, one)
            request.scope["grant"] = one
            return
    _check(request, last)
    request.scope["grant"] = last


def _check(request: Request, grant: Grant | None) -> None:
    """Raises: ScopeError."""
    route = request.scope["route"]
    check_scope(request.method, route.path, grant.scopes if grant is not None else ())
    if grant is None or not grant.projects:
        return
    named = any(one.alias == "project" for one in route.dependant.query_params)
    takes = named and route.path not in OF_ALL
    if not takes or not grant.projects.issuperset(request.query_params.getlist("project") or {""}):
        theirs = " or ".join(f"?project={one}" for one in sorted(grant.projects))
        what = f"send {theirs}" if takes else f"{route.path} is not about one project alone"
        raise ScopeError(f"this token is of a project: {what} (admin.tokens)")


async def own_projects(request: Request) -> frozenset[str]:
    """Return the projects that the caller may ask about; empty: everything."""
    grant: Grant = request.scope["grant"]
    return grant.projects


OwnProjects = Annotated[frozenset[str], Depends(own_projects)]


async def caller(request: Request) -> str:
    """Return the caller's name, which `reception` determined before routing."""
    grant: Grant = request.scope["grant"]
    return grant.name


Caller = Annotated[str, Depends(caller)]
"""Type of a route's parameter that holds the caller's name for the audit."""


def _text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        return value.decode("ascii")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"header {name.decode()}: holds bytes outside ASCII") from error


def _host_name(host: str | None) -> str:
    """Return the host without its port; empty when the header is absent or empty."""
    if not host:
        return ""
    name = host_name(host)
    if name is None:
        raise UnreadableError("header host: is not a host name with an optional port")
    return name
