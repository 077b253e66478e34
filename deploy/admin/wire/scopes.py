"""The scope that each route of the admin API needs. Pure.

The table is the one place that says it. A route that is not in the table answers nobody
(`needed_scope`), and a test compares the table with the routes, so that no new one is open by
accident. `Allow` of a 405 is read from it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from starlette.routing import compile_path

from deploy.errors import DeployError
from sidecar.settings.kinds import AdminScope

PREFIX: Final = "/admin/v1"
OPEN = None
"""Needs no token: the probes and the API's description."""

IMPLIED: dict[AdminScope, frozenset[AdminScope]] = {
    "read": frozenset({"read"}),
    "content": frozenset({"content", "read"}),
    "operate": frozenset({"operate", "read"}),
    "train": frozenset({"train", "read"}),
    "admin": frozenset({"admin", "content", "operate", "read", "train"}),
}
"""Scope of a token -> the scopes that it has by that."""
EVERY_SCOPE: frozenset[AdminScope] = IMPLIED["admin"]

_READS = (
    "/status", "/funnel", "/watch", "/learner", "/adapters", "/adapters/{version}", "/aliases",
    "/canaries", "/canaries/{canary_id}", "/groups", "/runs", "/runs/{run_id}",
    "/runs/{run_id}/steps", "/audit",
)  # fmt: skip
_CONTENT = (
    "/canaries/{canary_id}/evidence", "/groups/{group_id}", "/exchanges/{exchange_id}",
    "/sessions/{session_id:path}",
)  # fmt: skip
"""What users and models said, and the judge's words about it."""

NEEDED: dict[tuple[str, str], AdminScope | None] = {
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/admin/openapi.json"): OPEN,
    ("GET", "/metrics"): "read",
    **{("GET", PREFIX + path): "read" for path in _READS},
    **{("GET", PREFIX + path): "content" for path in _CONTENT},
    ("POST", PREFIX + "/rollback"): "operate",
    ("GET", PREFIX + "/rollback/targets"): "read",
    ("GET", PREFIX + "/aliases/{name}"): "read",
    ("GET", PREFIX + "/events"): "read",
    ("PUT", PREFIX + "/aliases/{name}"): "operate",
    ("POST", PREFIX + "/canaries"): "operate",
    ("POST", PREFIX + "/canaries/{canary_id}/{action}"): "operate",
    ("POST", PREFIX + "/adapters/{version}/allow"): "admin",
    ("POST", PREFIX + "/learner/{action}"): "train",
}
"""(method, path template) -> scope."""

_PATTERNS = [(compile_path(path)[0], path, method) for method, path in NEEDED]


class ScopeError(DeployError, PermissionError):
    """The token is valid and lacks the scope of this route."""


def scopes_of(granted: Iterable[AdminScope]) -> frozenset[AdminScope]:
    """Return every scope that a token with these has."""
    return frozenset[AdminScope]().union(*(IMPLIED[one] for one in granted))


def check_scope(method: str, template: str, granted: Collection[AdminScope]) -> None:
    """Raises: ScopeError, also for a route that the table lacks."""
    if (method, template) not in NEEDED:
        raise ScopeError(f"{method} {template} has no scope: it is closed to every token")
    needed = NEEDED[method, template]
    if needed is not OPEN and needed not in granted:
        has = ", ".join(sorted(granted)) or "none"
        raise ScopeError(f"this token lacks the scope {needed}; it has {has} (admin.tokens)")


def allowed_methods(path: str) -> list[str]:
    """List the methods that a path takes, for `Allow`. path: decoded, as in the ASGI scope.

    A path that is named itself, such as `.../evidence`, is no `{action}`."""
    found = [(template, method) for pattern, template, method in _PATTERNS if pattern.match(path)]
    named = [one for one in found if not one[0].endswith("/{action}")]
    return sorted({method for _, method in named or found})
