"""The `sidecar` command's way to the admin API: one place for its address, token and errors."""

from __future__ import annotations

import os
from typing import Any

import httpx

from deploy.errors import DeployError
from sidecar.settings import Settings
from sidecar.settings.kinds import base_url

TOKEN_VARIABLE = "SIDECAR_ADMIN_TOKEN"


class AdminApiError(DeployError, ConnectionError):
    """The admin API refused or could not be reached; the message is one line for a person."""


class AdminClient:
    """A thin client: paths under `/admin/v1`, JSON in and out."""

    def __init__(self, settings: Settings) -> None:
        self._url = f"{base_url(settings.admin.host, settings.admin.port)}/admin/v1"
        token = os.environ.get(TOKEN_VARIABLE, "")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, **params: str | int) -> Any:  # Any: JSON
        return self._ask("GET", path, params=params)

    def post(self, path: str, body: dict[str, Any] | None = None, etag: str | None = None) -> Any:
        headers = {"if-match": etag} if etag else {}
        return self._ask("POST", path, json=body or {}, headers=headers)

    def etag(self, path: str) -> str:
        """The current ETag of a resource, for a change that must not race."""
        return str(self._request("GET", path).headers.get("etag", ""))

    def _ask(self, method: str, path: str, **rest: Any) -> Any:
        return self._request(method, path, **rest).json()

    def _request(self, method: str, path: str, **rest: Any) -> httpx.Response:
        headers = {**self._headers, **rest.pop("headers", {})}
        try:
            reply = httpx.request(method, self._url + path, headers=headers, timeout=30.0, **rest)
        except httpx.HTTPError as error:
            raise AdminApiError(
                f"admin API at {self._url}: {error}; is `sidecar up` running? "
                "`sidecar rollback --offline` works without it"
            ) from error
        if reply.is_error:
            raise AdminApiError(f"admin API: {_problem(reply)}")
        return reply


def _problem(reply: httpx.Response) -> str:
    try:
        problem = reply.json()
    except ValueError:
        return f"{reply.status_code} {reply.text[:200]}"
    allowed = problem.get("allowed_actions")
    hint = f"; allowed now: {', '.join(allowed)}" if allowed else ""
    return f"{problem.get('title', reply.status_code)}: {problem.get('detail', '')}{hint}"
