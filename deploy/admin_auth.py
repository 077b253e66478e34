"""Who may call the admin API.

With tokens configured (as SHA-256 hex digests) a caller must show one of them as a bearer token.
Without, the listener is loopback only (the settings refuse anything else); then the caller is
whoever is on this machine, but not a web page in their browser: requests that carry a foreign
`Origin`, or a `Host` that is not a loopback name (DNS rebinding), are refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from deploy.errors import DeployError
from sidecar.settings.safety import is_loopback


class UnauthorizedError(DeployError, PermissionError):
    """No valid bearer token: show one."""


class ForbiddenError(DeployError, PermissionError):
    """The request comes from a web page, or from a name that is not this machine's."""


def actor_of(authorization: str | None, token_digests: Collection[str]) -> str:
    """Check the `Authorization` header. Pure.

    Returns: the name under which the audit keeps the caller: the start of the token's digest.
    Raises: UnauthorizedError.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnauthorizedError("send `Authorization: Bearer <token>`")
    digest = hashlib.sha256(token.strip().encode()).hexdigest()
    # All are compared, each in constant time: neither which nor how much matched shows in time.
    matches = [hmac.compare_digest(digest, known.lower()) for known in token_digests]
    if not any(matches):
        raise UnauthorizedError("this token is not known; admin.tokens holds the digests")
    return f"token:{digest[:8]}"


def refuse_browsers(host: str | None, origin: str | None) -> None:
    """Without tokens, let in this machine's own tools only. Pure. Raises: ForbiddenError."""
    name = urlsplit(f"//{host or ''}").hostname or ""
    if not is_loopback(name):
        raise ForbiddenError(
            f"Host {host!r} is not this machine; without admin.tokens use 127.0.0.1"
        )
    if origin is not None and urlsplit(origin).netloc != host:
        raise ForbiddenError(f"web pages of {origin} may not use the admin API")


async def caller(request: Request) -> str:
    """The caller's name for the audit. The app holds the digests in `state.token_digests`."""
    token_digests: Collection[str] = request.app.state.token_digests
    headers = request.headers
    if token_digests:
        return actor_of(headers.get("authorization"), token_digests)
    refuse_browsers(headers.get("host"), headers.get("origin"))
    return "local"


Caller = Annotated[str, Depends(caller)]
"""A parameter of this type lets in whoever may, and nobody else."""
