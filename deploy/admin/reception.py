"""ASGI middleware of the admin API: authenticate the caller, then read the body.

The caller is authenticated before any byte of the body is read, for every method and every path but
the probes. A body that is too long or too slow is refused; the routes get it whole. A refusal is
counted by reason and logged at most once for each reason in LOG_INTERVAL_S. Neither the token nor
the query is logged. Every reply has an `x-request-id`: the client's own, if it sent a plain one, or
a new one. The audit keeps it beside the change.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.admin.auth import (
    RefusalReason,
    RefusedError,
    TooLargeError,
    TooSlowError,
    admit,
    reason_of,
)
from deploy.admin.problems import refusal
from deploy.admin.wire import NEEDED, OPEN, UnreadableError, check_quoted, read_json
from deploy.registry import audit

log = structlog.get_logger()

PROBES = frozenset(path for (_, path), scope in NEEDED.items() if scope is OPEN)
"""Paths whose GET needs no authentication and has no body."""
REQUEST_ID = b"x-request-id"
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % audit.REQUEST_CHARACTERS)
MAX_BODY_BYTES = 65_536
"""Largest body. The longest that a route takes is a reason of 2,000 characters."""
BODY_TIMEOUT_S = 10.0
"""Timeout for receiving the whole body."""
LINGER_BYTES = 1_048_576
LINGER_S = 1.0
"""After a refusal, up to LINGER_BYTES of the body are read and discarded, for at most this long:
closing a connection with unread bytes resets it, and the client loses the reply."""
LOG_INTERVAL_S = 10.0
_LOGGED_PATH_CHARACTERS = 200
GUESS_S = 1.0
"""How long a wrong token waits for its reply."""
GUESSES = 20
"""Most that wait at once, a tenth of the connections (`wire.MOST`): more would keep people with a
right token out. The others are refused at once, and counted."""


class Refusals:
    """Counts refused requests by reason, and logs them at a bounded rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[RefusalReason] = Counter()
        self._clock = clock
        self._logged: dict[RefusalReason, tuple[float, int]] = {}
        self._guesses = 0

    async def slow_down(self, reason: RefusalReason) -> None:
        """Wait before a guessed token is answered; right ones never wait."""
        if reason != "unknown_token" or self._guesses >= GUESSES:
            return
        self._guesses += 1
        try:
            await asyncio.sleep(GUESS_S)
        finally:
            self._guesses -= 1

    def note(self, reason: RefusalReason, scope: Scope) -> None:
        """Count a refusal, and log it unless the same reason was logged within LOG_INTERVAL_S."""
        self.counts[reason] += 1
        now = self._clock()
        logged_at, counted = self._logged.get(reason, (now - LOG_INTERVAL_S, 0))
        if now - logged_at < LOG_INTERVAL_S:
            return
        unlogged = self.counts[reason] - counted - 1
        self._logged[reason] = (now, self.counts[reason])
        log.warning(
            "admin_refused",
            reason=reason,
            source=scope.get("source") or source_of(scope),
            method=scope["method"][:20],
            path=scope["path"][:_LOGGED_PATH_CHARACTERS],
            unlogged_before=unlogged,
        )


class Reception:
    """The middleware. It passes the caller and its scopes to the routes in `scope["grant"]`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Collection[str],
        refusals: Refusals,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._refusals = refusals
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "grant" in scope:  # the latter: asked in this process
            await self._app(scope, receive, send)
            return
        source, request_id = source_of(scope), request_id_of(scope)
        send = _naming(request_id, send)
        scope["source"], scope["refusals"] = source, self._refusals
        try:
            check_quoted(scope.get("raw_path") or scope["path"].encode(), "path")
            check_quoted(scope["query_string"], "query")
            if scope["path"] in PROBES and scope["method"] in ("GET", "HEAD"):
                body = b""
            else:
                scope["grant"] = admit(scope["headers"], self._tokens)
                body = await self._read_body(scope, receive)
        except (RefusedError, UnreadableError) as error:
            self._refusals.note(reason_of(error), scope)
            await self._refusals.slow_down(reason_of(error))
            await _answer_and_close(refusal(scope["path"], error), scope, receive, send)
            return
        except ConnectionAbortedError:
            log.debug("admin_client_left", source=source)
            return
        with audit.changes_come_from(source, request_id):
            await self._app(scope, _once(body, receive), send)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body.

        Raises: TooLargeError, TooSlowError, UnreadableError; ConnectionAbortedError.
        """
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > MAX_BODY_BYTES:
                raise _too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionAbortedError("the client disconnected during its body")
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY_BYTES:
                        raise _too_large()
                    more = message.get("more_body", False)
        except TimeoutError as error:
            raise TooSlowError(
                "too_slow", f"the body did not arrive within {self._body_timeout_s:g} s"
            ) from error
        if body:
            read_json(bytes(body), "body")
        return bytes(body)


def source_of(scope: Scope) -> str:
    """Return the peer address of the connection; forwarding headers are not trusted."""
    client = scope.get("client")
    return str(client[0])[: audit.SOURCE_CHARACTERS] if client else ""


def request_id_of(scope: Scope) -> str:
    """Return the client's `x-request-id` if it is plain text of bounded length, else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _PLAIN_ID.fullmatch(value):
            return bytes(value).decode()
    return uuid.uuid4().hex


def _naming(request_id: str, send: Send) -> Send:
    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            named = [*message.get("headers", ()), (REQUEST_ID, request_id.encode())]
            message = {**message, "headers": named}
        await send(message)

    return send_named


def _too_large() -> TooLargeError:
    return TooLargeError("too_large", f"a body has at most {MAX_BODY_BYTES} bytes")


def _once(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that first yields the body read already, then later events."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_whole() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_whole


async def _answer_and_close(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    response.headers["connection"] = "close"

    async def send_and_linger(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        # The content-length completes the reply for the client. The last, empty part would close
        # the connection, so it is sent after the rest of the body was read.
        await send({**message, "more_body": True})
        await _discard(scope, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    await response(scope, receive, send_and_linger)


async def _discard(scope: Scope, receive: Receive) -> None:
    announced = {name for name, _ in scope["headers"]} & {b"content-length", b"transfer-encoding"}
    left = LINGER_BYTES if announced else 0
    deadline = asyncio.get_running_loop().time() + LINGER_S
    while left > 0:
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            return
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
