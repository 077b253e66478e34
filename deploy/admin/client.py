"""The `sidecar` command's client of the admin API: its address, token and errors.

The token is sent to the admin API only, and no redirect is followed. A loopback address is never
reached through the environment's proxy (`HTTP_PROXY`). Any other address is, unless `NO_PROXY`
names it, as usual for HTTP clients; the API speaks plain HTTP, so that proxy can read the token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from deploy.errors import DeployError
from sidecar.errors import SettingsError
from sidecar.hiding import hide_in_url
from sidecar.settings import Settings
from sidecar.settings.kinds import from_file, is_loopback

TOKEN_VARIABLE = "SIDECAR_ADMIN_TOKEN"
TIMEOUT_S = 30.0
OF_A_LINE = frozenset(
    {
        *("status", "progress", "funnel", "watch", "learner", "adapters", "aliases", "rollback"),
        *("canaries", "runs", "groups", "task-groups", "exchanges", "sessions"),
    }
)
"""Resources that each line of adapters has."""
PROBLEM = "urn:learning-sidecar:problem:"
"""How the type of each error of the admin API begins (`deploy.admin.problems`, which loads
slowly)."""
CHECK = "check admin.url, or admin.host and admin.port"
SHOWN = 100
"""Characters of another service's reply that an error repeats."""


class AdminApiError(DeployError, ConnectionError):
    """The admin API refused or could not be reached; the message is one line for a person."""


class AdminClient:
    """A thin client: paths under `/admin/v1`, JSON in, JSON or text out."""

    def __init__(self, settings: Settings, project: str | None = None) -> None:
        """project: whose line of adapters is asked about; None: the default line.

        Raises: SettingsError when the token cannot be a header value, or the project has no line.
        """
        self._project = settings.line_named(project).project
        self._url = f"{settings.admin.base_url}/admin/v1"
        try:
            token = str(from_file(os.environ.get(TOKEN_VARIABLE, "").strip()))
        except ValueError as error:
            raise SettingsError(f"{TOKEN_VARIABLE} {error}") from None
        if not (token.isascii() and token.isprintable()):
            raise SettingsError(
                f"{TOKEN_VARIABLE} holds characters that a header cannot; set it to the token alone"
            )
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._takes_proxy = not is_loopback(urlsplit(self._url).hostname or "")

    def get(self, *path: str, **params: str | int) -> Any:  # Any: JSON
        """Read a resource.

        path: parts of the path; all but the first are user input and are percent-encoded.
        Raises: AdminApiError.
        """
        return self.ask(*path, params=params)[0]

    def ask(
        self,
        *path: str,
        method: str = "GET",
        body: dict[str, Any] | None = None,
        etag: str | None = None,
        text: bool = False,
        columns: int | None = None,
        params: Mapping[str, str | int] | None = None,
    ) -> tuple[Any, list[str]]:  # Any: JSON, or text
        """Read a resource, change one or perform an action.

        path: as for `get`. etag: for `If-Match`. text: answer in lines. columns: characters of a
        line of a table; None: any number.
        Returns: the reply, and what a person has to know beside it. Raises: AdminApiError.
        """
        headers = {"if-match": etag} if etag else {}
        if text:
            headers["accept"] = "text/plain"
        if columns is not None:
            headers["x-sidecar-columns"] = str(columns)
        reply = self._request(method, path, params or {}, body, headers)
        found = _text(reply) if text else _read(reply)
        try:
            notes = list(json.loads(reply.headers.get("x-sidecar-notes", "[]")))
        except (ValueError, TypeError) as error:
            raise AdminApiError(_not_it(reply, "notes")) from error
        return found, [str(one) for one in notes]

    def etag(self, *path: str) -> str:
        """Return a resource's current ETag, for a conditional change. Raises: AdminApiError."""
        return str(self._request("GET", path, {}, None, {}).headers.get("etag", ""))

    def _request(
        self,
        method: str,
        path: tuple[str, ...],
        params: Mapping[str, str | int],
        body: dict[str, Any] | None,
        headers: dict[str, str],
    ) -> httpx.Response:
        if self._project is not None and is_of_a_line(path):
            params = {**params, "project": self._project}
        url = "/".join([self._url + path[0], *(quote(part, safe="") for part in path[1:])])
        try:
            reply = httpx.request(
                method,
                url,
                params=params,
                json=body,
                headers={**self._headers, **headers},
                timeout=TIMEOUT_S,
                trust_env=self._takes_proxy,
                follow_redirects=False,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AdminApiError(
                f"admin API at {self._url}: {error}; is `sidecar up` running? "
                "`sidecar doctor` and `sidecar rollback --offline` work without it"
            ) from error
        if not reply.is_success:
            has_token = "authorization" in self._headers
            raise AdminApiError(f"admin API: {_problem(reply, has_token=has_token)}")
        return reply


def _token_problem(has_token: bool) -> str:
    if has_token:
        return (
            f"it does not know the token in {TOKEN_VARIABLE}; set that to one whose digest is in "
            "control's admin.tokens"
        )
    return f"it wants a token; set {TOKEN_VARIABLE} to one whose digest is in admin.tokens"


def is_of_a_line(path: Sequence[str]) -> bool:
    """Return True for the path of a resource that takes `?project=`. path: its parts."""
    return path[0].removeprefix("/") in OF_A_LINE


def _read(reply: httpx.Response) -> Any:  # Any: JSON
    try:
        return reply.json()
    except (ValueError, RecursionError) as error:
        raise AdminApiError(_not_it(reply, "JSON")) from error


def _not_it(reply: httpx.Response, kind: str) -> str:
    return f"{reply.url} did not answer with {kind}; {CHECK}"


def _text(reply: httpx.Response) -> str:
    if not reply.headers.get("content-type", "").startswith("text/plain"):
        raise AdminApiError(_not_it(reply, "text"))
    return reply.text


def _problem(reply: httpx.Response, *, has_token: bool) -> str:
    if reply.is_redirect:
        return f"{reply.status_code}, a redirect: not followed; {CHECK}"
    try:
        problem = dict(reply.json())
    except (ValueError, TypeError, RecursionError):
        problem = {}
    if not str(problem.get("type", "")).startswith(PROBLEM):
        said = f"{reply.status_code} {hide_in_url(reply.text[:SHOWN])}".rstrip()
        return (
            f"what answers at {reply.url} is not it ({said}); {CHECK}: they "
            "must be those of control"
        )
    if reply.status_code == 401:
        return _token_problem(has_token)
    allowed = [str(one) for one in problem.get("allowed_actions") or []]
    detail = str(problem.get("detail", ""))
    told = all(one in detail for one in allowed)
    hint = "" if told else f"; allowed now: {', '.join(allowed)}"
    return f"{problem.get('title', reply.status_code)}: {detail}{hint}"
