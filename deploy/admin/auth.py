"""Authenticate callers of the admin API. Pure: `reception` calls it before it reads a body.

With tokens configured (as SHA-256 hex digests) a caller must send one of them as a bearer token.
Without tokens the listener is loopback only (the settings refuse anything else), and every local
process may call. A web page in a local browser may not: requests with a foreign `Origin`, or with a
`Host` that is not a loopback name (DNS rebinding), are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Depends, Request

from deploy.admin.json import UnreadableError
from deploy.errors import DeployError
from sidecar.settings.addresses import is_loopback

LOCAL = "local"
"""Actor in the audit when no token is configured."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{1,5})?")

RefusalReason = Literal[
    "no_token", "unknown_token", "foreign_host", "foreign_origin", "unreadable", "too_large",
    "too_slow",
]  # fmt: skip
"""Reasons to refuse a request before routing; label values of `sidecar_admin_refused_total`."""


class RefusedError(DeployError):
    """The request is refused before routing. `reason` labels the metric and the log event."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: RefusalReason = reason


class UnauthorizedError(RefusedError, PermissionError):
    """The request has no valid bearer token."""


class ForbiddenError(RefusedError, PermissionError):
    """The request comes from a web page, or its Host is not a loopback name."""


class TooLargeError(RefusedError):
    """The body exceeds `MAX_BODY_BYTES`."""


class TooSlowError(RefusedError, TimeoutError):
    """The body did not arrive in time."""


def admit(headers: Iterable[tuple[bytes, bytes]], token_digests: Collection[str]) -> str:
    """Authenticate a request by its headers.

    headers: (name, value) pairs with lower-case names, as in ASGI.
    Returns: the caller's name for the audit.
    Raises: UnreadableError, UnauthorizedError, ForbiddenError.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (b"host", b"origin", b"authorization") and name in found:
            raise UnreadableError(f"header {name.decode()}: occurs twice; send it once")
        found[name] = value
    host, origin = _text(found, b"host"), _text(found, b"origin")
    asked_host = _host_name(host)
    netloc = _netloc(origin)
    if token_digests:
        return actor_of(found.get(b"authorization"), token_digests)
    if not is_loopback(asked_host):
        raise ForbiddenError(
            "foreign_host",
            f"Host {host!r} is not this machine; without admin.tokens use 127.0.0.1",
        )
    if origin is not None and netloc != host:
        raise ForbiddenError("foreign_origin", f"web pages of {origin!r} may not use the admin API")
    return LOCAL


def actor_of(authorization: bytes | None, token_digests: Collection[str]) -> str:
    """Check the `Authorization` header.

    Returns: the caller's name for the audit: the start of the token's digest.
    Raises: UnauthorizedError.
    """
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip():
        raise UnauthorizedError("no_token", "send `Authorization: Bearer <token>`")
    digest = hashlib.sha256(token.strip()).hexdigest()
    # Every digest is compared, in constant time: timing shows neither the match nor its length.
    matches = [hmac.compare_digest(digest.encode(), one.lower().encode()) for one in token_digests]
    if not any(matches):
        raise UnauthorizedError(
            "unknown_token", "unknown token; admin.tokens lists the digests of valid ones"
        )
    return f"token:{digest[:8]}"


async def caller(request: Request) -> str:
    """Return the caller's name, which `reception` determined before routing."""
    return str(request.scope["caller"])


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
    match = _HOST.fullmatch(host)
    if match is None:
        raise UnreadableError("header host: is not a host name with an optional port")
    return match[1].strip("[]").lower()


def _netloc(origin: str | None) -> str:
    try:
        return urlsplit(origin or "").netloc
    except ValueError as error:
        raise UnreadableError("header origin: is not a URL") from error
