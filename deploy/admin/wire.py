"""The admin listener: its connections, the scopes and description of its routes, and its JSON.

uvicorn times a connection between two requests, but neither one whose request head never ends nor
one whose client does not read. Without a bound such connections take every file that control may
open, and with them the rollback; so nobody needs a token to keep one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from typing import Any, ClassVar, Final, NoReturn, cast
from urllib.parse import unquote_to_bytes

import h11
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import compile_path
from uvicorn.protocols.http.h11_impl import H11Protocol

from deploy.admin.out import Problem
from deploy.admin.text import missing_notes, reply_lines, reply_notes
from deploy.errors import DeployError
from deploy.text import WHOLE
from sidecar.settings.kinds import AdminScope
from sidecar.visible import visible

HEAD_S: Final = 10.0
"""Time for a whole request head, from the connection or from the head's first byte. uvicorn reads
at most 64 KiB of it."""
KEPT: Final = 128 * 1024
"""Bytes of replies that the system keeps for a client (Linux: twice as many). By itself it keeps
megabytes, and takes seconds of work to show that a client reads nothing."""
STUCK_S: Final = 20.0
"""Time in which a client that has a reply to read must read some of it. The system takes bytes
again only when a third of what it keeps has gone: who reads 5 kB a second passes."""
MOST: Final = 200
"""Connections at once: 60 streams, and people and scripts that ask. A process may open 1,024 files
on most systems."""


class AdminConnection(H11Protocol):
    """One connection."""

    most: ClassVar[int] = MOST
    """Connections at once, where fewer files than for `MOST` may be open."""
    _timer: asyncio.TimerHandle | None = None
    _since: float = 0.0
    _writing: asyncio.TimerHandle | None = None
    _stuck_since: float | None = None
    """Since when bytes wait for the client to read; None: none do."""
    _unsent: int = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # any byte that waits calls `pause_writing`
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KEPT)
        self._wait()
        open_ones = cast(list[AdminConnection], list(self.connections))
        open_ones = [one for one in open_ones if not one._is_gone()]
        if len(open_ones) > self.most:
            self._make_room(open_ones)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._asks_nothing():
            self._stop_waiting()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._stuck_since = self.loop.time()
            self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _asks_nothing(self) -> bool:
        """Return True until a request head is complete."""
        return self.conn.their_state is h11.IDLE

    def _wait(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._asks_nothing():
            self.transport.abort()

    def _watch_writing(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(STUCK_S, self._has_read)

    def _has_read(self) -> None:
        """Close the connection unless its client has read since; then look again."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_writing()
        else:
            self._drop()

    def _stop_watching(self) -> None:
        self._stuck_since = None
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _is_gone(self) -> bool:
        """One that closes keeps its file until its client has read the rest."""
        return self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    def _drop(self) -> None:
        self._stop_watching()
        if (sock := self.transport.get_extra_info("socket")) is not None:
            # Else the system would keep the unsent bytes for minutes.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _make_room(self, open_ones: list[AdminConnection]) -> None:
        """Close the one that has asked nothing, or read nothing, for longest; this one if all
        others are at work."""
        idle = {one: one._since for one in open_ones if one._asks_nothing()}
        stuck = {one: one._stuck_since for one in open_ones if one._stuck_since is not None}
        since = {one: at for one, at in (idle | stuck).items() if one is not self}
        min(since, key=since.__getitem__, default=self)._drop()


# The scope that each route of the admin API needs. Pure.

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
    "/progress", "/canaries", "/canaries/{canary_id}", "/groups", "/runs", "/runs/{run_id}",
    "/task-groups", "/task-groups/{task_group_id}",
    "/audit",
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
    ("POST", PREFIX + "/groups/retry"): "train",
}
"""(method, path template) -> scope."""

OF_ALL: Final = frozenset({f"{PREFIX}/funnel"})
"""Routes that take a project and count all of them together: closed to a token of a project."""
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


# The API's description: how to authenticate, the scope of each route, and how errors look.

MEDIA_TYPE = "application/problem+json"
Json = dict[str, Any]
ETAGS = frozenset(
    {("GET", "/learner"), ("POST", "/learner/{action}"), ("POST", "/canaries")}
    | {("GET", "/canaries/{canary_id}"), ("POST", "/canaries/{canary_id}/{action}")}
    | {("GET", "/aliases/{name}"), ("PUT", "/aliases/{name}")}
)
"""Routes whose reply has the ETag that a change of the same resource sends as If-Match."""


def _header(description: str) -> Json:
    return {"description": description, "schema": {"type": "string"}}


REQUEST_ID = _header("The request's own, if it is plain text, else a new one; the audit has it.")
ETAG = _header("Of the state that the reply shows: If-Match of a change. Not weak.")
LOCATION = _header("The path of the canary.")


def _headers(method: str, path: str) -> Json:
    """Describe the headers of a success."""
    found = {"x-request-id": REQUEST_ID}
    if (method, path.removeprefix(PREFIX)) in ETAGS:
        found["etag"] = ETAG
    if (method, path) == ("POST", f"{PREFIX}/canaries"):
        found["location"] = LOCATION
    return found


def describe(app: FastAPI) -> Json:
    """Return the OpenAPI document. The caller keeps it: it does not change while the app runs."""
    document: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    parts = document.setdefault("components", {})
    parts["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token whose SHA-256 digest is in admin.tokens. Without any there, "
            "processes of this machine need none.",
        }
    }
    schemas = parts.setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, method.upper(), path)
    return document


def _complete(operation: Json, method: str, path: str) -> None:
    scope = NEEDED.get((method, path), NEEDED.get((method, path.replace("}", ":path}"))))
    is_open = scope is OPEN
    operation["security"] = [] if is_open else [{"token": []}]
    if not is_open:
        operation["x-scope"] = scope
        told = operation.get("description", "")
        operation["description"] = f"{told}\n\nNeeds the scope `{scope}`.".strip()
    replies = operation["responses"]
    for status, reply in replies.items():
        if status.startswith("2"):
            reply["headers"] = _headers(method, path)
            if path.startswith(PREFIX) and "application/json" in reply["content"]:
                reply["content"]["text/plain"] = {"schema": {"type": "string"}}
    replies.pop("422", None)  # the framework's; ours is a problem, as every error
    replies["default"] = {
        "description": "Any error.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


# Read untrusted JSON of admin requests, and show untrusted JSON of the store. Pure.

MAX_DEPTH = 16
"""Deepest nesting of a request; every body and cursor of this API is flat."""
MAX_SHOWN_DEPTH = 200
"""Deepest nesting of a shown value: Pydantic serialises 255 levels, the enclosing ones included."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that a database column holds."""


class UnreadableError(DeployError, ValueError):
    """The request is malformed; the message names the place."""


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII: a lone surrogate that a client wrote into the store is sent escaped."""

    def render(self, content: Any) -> bytes:  # Any: JSON
        return json.dumps(content, separators=(",", ":")).encode()


NOTES = "x-sidecar-notes"
"""Header of a reply: JSON list of what a person has to know beside it."""
MOST_NOTES, NOTE_CHARACTERS = 20, 1_000
COLUMNS = "x-sidecar-columns"
"""Header of a request for text: characters of a line, for the last column of a table."""


class TextRoute(APIRoute):
    """A route that answers in text where the request asks for it: `Accept: text/plain`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_as_asked(request: Request) -> Response:
            reply = await answer(request)
            return self._as_asked(request, reply) if isinstance(reply, JSONResponse) else reply

        return answer_as_asked

    def _as_asked(self, request: Request, reply: Response) -> Response:
        path, found, now = (
            self.path.removeprefix(PREFIX),
            json.loads(bytes(reply.body)),
            time.time(),
        )
        notes = list(reply_notes(path, found, now, {**request.query_params, **request.path_params}))
        if "text/plain" in request.headers.get("accept", ""):
            columns = request.headers.get(COLUMNS, "")
            width = int(columns) if columns.isdecimal() and len(columns) < 6 else WHOLE
            lines = reply_lines(path, found, now, width)
            text = "".join(f"{visible(line)}\n" for line in lines)
            made = PlainTextResponse(text, reply.status_code)
            for name in {"etag", "location"} & set(reply.headers):
                made.headers[name] = reply.headers[name]
            notes += missing_notes(found)
            reply = made
        if notes:
            kept = [visible(one)[:NOTE_CHARACTERS] for one in notes[:MOST_NOTES]]
            reply.headers[NOTES] = json.dumps(kept)
        return reply


def read_stored(data: bytes) -> dict[str, Any]:
    """Read a JSON object that a client wrote into the store, for a reply.

    Returns: the object; if it is no object or nested too deep, its text under `unreadable`.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and max(depth for _, depth in _walk(value)) <= MAX_SHOWN_DEPTH:
        return value
    return {"unreadable": data.decode("utf-8", "replace")}


def read_json(data: bytes, where: str) -> Any:  # Any: JSON
    """Parse a JSON text. where: its name in the error. Raises: UnreadableError."""
    try:
        value = json.loads(
            data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except _DoubledError as error:
        raise UnreadableError(f"{where}: has the name {error} twice; send it once") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{where}: is not readable JSON; send UTF-8 JSON") from error
    for one, depth in _walk(value):
        if depth > MAX_DEPTH:
            raise UnreadableError(f"{where}: is nested deeper than {MAX_DEPTH}; send it flat")
        if isinstance(one, str):
            check_text(one, where)
        elif isinstance(one, int | float) and not -MAX_INTEGER <= one <= MAX_INTEGER:
            raise UnreadableError(f"{where}: holds a number beyond 64 bits")
    return value


def check_text(text: str, where: str) -> None:
    """Check that the store and a reply can hold this text. Raises: UnreadableError."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UnreadableError(f"{where}: holds a NUL or a lone surrogate; send UTF-8 text")


def check_quoted(quoted: bytes, where: str) -> None:
    """Check a percent-encoded path or query. Raises: UnreadableError."""
    try:
        text = unquote_to_bytes(quoted).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{where}: is not UTF-8; send percent-encoded UTF-8") from error
    check_text(text, where)


class _DoubledError(ValueError):
    """A name is twice in one object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Which of two values of a name was meant, nobody knows."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _DoubledError(ascii(name[:64]))
        found[name] = value
    return found


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield every value inside a JSON value, member names too, with its depth. Not recursive."""
    waiting = [(value, 1)]
    while waiting:
        one, depth = waiting.pop()
        yield one, depth
        if isinstance(one, list):
            waiting += [(item, depth + 1) for item in one]
        elif isinstance(one, dict):
            waiting += [(item, depth + 1) for pair in one.items() for item in pair]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
