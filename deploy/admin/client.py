"""The `sidecar` command's client of the admin API: its address, token and errors.

The token is sent to the admin API only, and no redirect is followed. A loopback address is never
reached through the environment's proxy (`HTTP_PROXY`). Any other address is, unless `NO_PROXY`
names it, as usual for HTTP clients; the API speaks plain HTTP, so that proxy can read the token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from deploy.errors import DeployError
from sidecar.errors import SettingsError
from sidecar.settings import Settings
from sidecar.settings.kinds import base_url, is_loopback

TOKEN_VARIABLE = "SIDECAR_ADMIN_TOKEN"
TIMEOUT_S = 30.0
OF_A_LINE = frozenset({"status", "funnel", "watch", "learner", "adapters", "aliases", "rollback"})
"""Resources that each line of adapters has."""
LISTED_OF_A_LINE = frozenset({"canaries", "runs", "groups"})
"""Resources that are listed for each line; one of them is named by an id that all lines share."""
PROBLEM = "urn:learning-sidecar:problem:"
"""How the type of each error of the admin API begins (`deploy.admin.problems`, which loads
slowly)."""
SHOWN = 100
"""Characters of another service's reply that an error repeats."""
PAGE_ITEMS = 200
"""Items of one request: the most that the admin API gives."""


class AdminApiError(DeployError, ConnectionError):
    """The admin API refused or could not be reached; the message is one line for a person."""


class AdminClient:
    """A thin client: paths under `/admin/v1`, JSON in and out."""

    def __init__(self, settings: Settings, project: str | None = None) -> None:
        """project: whose line of adapters is asked about; None: the default line.

        Raises: SettingsError when the token cannot be a header value, or the project has no line.
        """
        self._project = settings.line_named(project).project
        self._url = f"{base_url(settings.admin.host, settings.admin.port)}/admin/v1"
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
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
        return _read(self._request("GET", path, params=params))

    def get_all(self, path: str, **params: str | int) -> dict[str, Any]:
        """Read every page of a listing, as one page. Raises: AdminApiError."""
        items: list[Any] = []
        damaged: list[str] = []
        place: dict[str, str] = {}
        while True:
            page = self.get(path, limit=PAGE_ITEMS, **params, **place)
            if "items" not in page:
                return dict(page)  # not this version's listing: the caller shows it as it is
            items += page["items"]
            damaged += page.get("damaged", [])
            if page.get("next_cursor") is None:
                return {"items": items, "next_cursor": None, "damaged": damaged}
            place = {"cursor": page["next_cursor"]}

    def post(self, *path: str, body: dict[str, Any], etag: str | None = None) -> Any:
        """Perform an action. path: as for `get`; etag: for `If-Match`. Raises: AdminApiError."""
        headers = {"if-match": etag} if etag else {}
        return _read(self._request("POST", path, json=body, headers=headers))

    def put(self, *path: str, body: dict[str, Any], etag: str) -> Any:
        """Change a resource. As `post`. Raises: AdminApiError."""
        return _read(self._request("PUT", path, json=body, headers={"if-match": etag}))

    def etag(self, *path: str) -> str:
        """Return a resource's current ETag, for a conditional change. Raises: AdminApiError."""
        return str(self._request("GET", path).headers.get("etag", ""))

    def _request(self, method: str, path: tuple[str, ...], **rest: Any) -> httpx.Response:
        headers = {**self._headers, **rest.pop("headers", {})}
        if self._project is not None and is_of_a_line(path):
            rest["params"] = {**rest.get("params", {}), "project": self._project}
        url = "/".join([self._url + path[0], *(quote(part, safe="") for part in path[1:])])
        try:
            reply = httpx.request(
                method,
                url,
                headers=headers,
                timeout=TIMEOUT_S,
                trust_env=self._takes_proxy,
                follow_redirects=False,
                **rest,
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
    name = path[0].removeprefix("/")
    return name in OF_A_LINE or (name in LISTED_OF_A_LINE and len(path) == 1)


def _read(reply: httpx.Response) -> Any:  # Any: JSON
    try:
        return reply.json()
    except ValueError as error:
        raise AdminApiError(
            f"{reply.url} did not answer with JSON; check admin.host and admin.port"
        ) from error


def _problem(reply: httpx.Response, *, has_token: bool) -> str:
    if reply.is_redirect:
        return f"{reply.status_code}, a redirect: not followed; check admin.host and admin.port"
    try:
        problem = dict(reply.json())
    except (ValueError, TypeError):
        problem = {}
    if not str(problem.get("type", "")).startswith(PROBLEM):
        said = f"{reply.status_code} {reply.text[:SHOWN]}".rstrip()
        return (
            f"what answers at {reply.url} is not it ({said}); check admin.host and admin.port: "
            "they must be those of control"
        )
    if reply.status_code == 401:
        return _token_problem(has_token)
    allowed = [str(one) for one in problem.get("allowed_actions") or []]
    detail = str(problem.get("detail", ""))
    told = all(one in detail for one in allowed)
    hint = "" if told else f"; allowed now: {', '.join(allowed)}"
    return f"{problem.get('title', reply.status_code)}: {detail}{hint}"
