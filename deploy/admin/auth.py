"""Who may call the admin API. Pure: `admin_reception` asks before it reads a request's body.

With tokens configured (as SHA-256 hex digests) a caller must show one of them as a bearer token.
Without, the listener is loopback only (the settings refuse anything else); then the caller is
whoever is on this machine, but not a web page in their browser: requests that carry a foreign
`Origin`, or a `Host` that is not a loopback name (DNS rebinding), are refused.
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
"""The audit's name of a caller that showed no token because none is configured."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{1,5})?")

RefusalReason = Literal[
    "no_token", "unknown_token", "foreign_host", "foreign_origin", "unreadable", "too_large",
    "too_slow",
]  # fmt: skip
"""Why a request is refused before any route sees it; the label of `sidecar_admin_refused_total`."""


class RefusedError(DeployError):
    """The request is refused; `reason` is for the metric and the log."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: RefusalReason = reason


class UnauthorizedError(RefusedError, PermissionError):
    """No valid bearer token: show one."""


class ForbiddenError(RefusedError, PermissionError):
    """The request comes from a web page, or from a name that is not this machine's."""


class TooLargeError(RefusedError):
    """The body is over the limit."""


class TooSlowError(RefusedError, TimeoutError):
    """The body did not come in time."""


def admit(headers: Iterable[tuple[bytes, bytes]], token_digests: Collection[str]) -> str:
    """Decide who asks, by the request's headers.

    headers: names in lower case, as ASGI has them.
    Returns: the name under which the audit keeps the caller.
    Raises: UnreadableError, UnauthorizedError, ForbiddenError.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (b"host", b"origin", b"authorization") and name in found:
            raise UnreadableError(f"header {name.decode()}: is there twice; send it once")
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

    Returns: the name under which the audit keeps the caller: the start of the token's digest.
    Raises: UnauthorizedError.
    """
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip():
        raise UnauthorizedError("no_token", "send `Authorization: Bearer <token>`")
    digest = hashlib.sha256(token.strip()).hexdigest()
    # All are compared, each in constant time: neither which nor how much matched shows in time.
    matches = [hmac.compare_digest(digest.encode(), one.lower().encode()) for one in token_digests]
    if not any(matches):
        raise UnauthorizedError(
            "unknown_token", "this token is not known; admin.tokens holds the digests"
        )
    return f"token:{digest[:8]}"


async def caller(request: Request) -> str:
    """The caller's name, which `admin_reception` found out before any route is asked."""
    return str(request.scope["caller"])


Caller = Annotated[str, Depends(caller)]
"""A parameter of this type holds the caller's name for the audit."""


def _text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        return value.decode("ascii")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"header {name.decode()}: holds bytes that are no ASCII") from error


def _host_name(host: str | None) -> str:
    """The name without its port; empty when the header is absent or empty."""
    if not host:
        return ""
    match = _HOST.fullmatch(host)
    if match is None:
        raise UnreadableError("header host: is no host name with an optional port")
    return match[1].strip("[]").lower()


def _netloc(origin: str | None) -> str:
    try:
        return urlsplit(origin or "").netloc
    except ValueError as error:
        raise UnreadableError("header origin: is no URL") from error
