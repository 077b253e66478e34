"""Ask the admin API inside this process, as the visitor who asks the page.

The page has no reads and no rights of its own: every figure and every change goes through a route
of `/admin/v1`, which checks what the visitor may do. Only the reception is left out, because the
page has told who the visitor is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.admin.client import is_of_a_line
from deploy.errors import DeployError
from deploy.registry import audit

Reply = TypeVar("Reply", bound=BaseModel)


class ProblemError(DeployError):
    """The admin API refused, or could not answer."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title


class Ask:
    """The admin API for one visitor."""

    def __init__(
        self,
        api: ASGIApp,
        given: Mapping[str, Any],
        source: str,
        request_id: str,
        project: str | None = None,
    ) -> None:
        """api: the routes without their reception. given: what the reception would have added to
        the request's scope. source, request_id: what audit rows name. project: whose line of
        adapters is asked about; None: the default line."""
        self._api = api
        self._project = project
        self._given = dict(given)
        self._origin = (source, request_id)

    async def get(self, kind: type[Reply], *path: str, **query: Any) -> Reply:
        """Raises: ProblemError."""
        reply = await self._send("GET", path, query={k: v for k, v in query.items() if v})
        return _read(kind, reply)

    async def post(
        self, kind: type[Reply], *path: str, body: Mapping[str, Any], if_match: str = ""
    ) -> Reply:
        """Raises: ProblemError."""
        headers = {"if-match": if_match} if if_match else {}
        return _read(kind, await self._send("POST", path, body=body, headers=headers))

    async def etag(self, *path: str) -> str:
        """Return the entity tag of a resource. Raises: ProblemError."""
        reply = await self._send("GET", path)
        return str(reply.headers.get("etag", ""))

    async def _send(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        if self._project is not None and is_of_a_line(path):
            query = {**(query or {}), "project": self._project}
        transport = httpx.ASGITransport(app=self._known, raise_app_exceptions=False)
        client = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1/admin/v1", trust_env=False
        )
        url = "/" + "/".join(httpx.URL(path="/" + one).raw_path[1:].decode() for one in path)
        async with client:
            with audit.changes_come_from(*self._origin):
                reply = await client.request(
                    method, url, params=query or None, json=body, headers=headers
                )
        if reply.is_error:
            raise _problem(reply)
        return reply

    async def _known(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api({**scope, **self._given}, receive, send)


def _read(kind: type[Reply], reply: httpx.Response) -> Reply:
    try:
        return kind.model_validate_json(reply.content)
    except ValidationError as error:
        raise ProblemError(502, "Unreadable", f"{kind.__name__}: {error.error_count()}") from error


def _problem(reply: httpx.Response) -> ProblemError:
    try:
        found = reply.json()
        return ProblemError(reply.status_code, str(found["title"]), str(found["detail"]))
    except (ValueError, KeyError, TypeError):
        return ProblemError(reply.status_code, "The admin API failed", reply.text[:200])
