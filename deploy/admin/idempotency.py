"""`Idempotency-Key`: a change that is asked again is not made again; its first reply is sent again.

ASGI middleware between `reception` and the routes. The rules are those of the Internet-Draft
(draft-ietf-httpapi-idempotency-key-header-07): the same key with the same request gets the stored
reply, with another request 422, and 409 while the first one is being answered. Keys are kept
KEPT_S and belong to one caller. Only successes are kept: an error changed nothing, so the request
may be made again with the same key.

A process that is killed during a change leaves its key taken for TAKEN_S. Whoever asks after that
makes the change again, which is safe: every change here is idempotent by meaning, or names the
ETag of the state that it changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.admin.problems import KeyInUseError, KeyReusedError, refusal
from deploy.admin.wire import UnreadableError, allowed_methods
from sidecar.errors import StoreError
from sidecar.store.database import Database
from sidecar.store.models import IdempotentReplyRow

log = structlog.get_logger()

HEADER = b"idempotency-key"
REPLAYED = "idempotency-replayed"
"""Header of a reply that was stored."""
CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
MAX_CHARACTERS = 255
KEPT_S = 86_400.0
TAKEN_S = 60.0
"""Longest time that an unanswered key is held: the `sidecar` command waits 30 s for a reply."""
MAX_ROWS = 10_000
"""Most keys that are kept; the oldest go first. At 1 kB each they are 10 MB."""


@dataclass(frozen=True, slots=True)
class StoredReply:
    status: int
    etag: str
    body: str


@dataclass(slots=True)
class _Caught:
    """The reply of the routes, as it was sent."""

    status: int = 0
    etag: str = ""
    body: bytearray = field(default_factory=bytearray)


class Idempotency:
    """The middleware."""

    def __init__(
        self, app: ASGIApp, *, database: Database, clock: Callable[[], float] = time.time
    ) -> None:
        self._app = app
        self._database = database
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in CHANGES:
            await self._app(scope, receive, send)
            return
        try:
            key = key_of(scope)
            if key is None or scope["method"] not in allowed_methods(scope["path"]):
                await self._app(scope, receive, send)
                return
            body = await _whole_body(receive)
            actor = scope["grant"].name
            mark = fingerprint(scope, body)
            stored = await asyncio.to_thread(self._begin, actor, key, mark)
        except (UnreadableError, KeyInUseError, KeyReusedError, StoreError) as error:
            await refusal(scope["path"], error)(scope, receive, send)
            return
        if stored is not None:
            await _replay(stored)(scope, receive, send)
            return
        await self._answer(scope, _given(body, receive), send, actor, key)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, actor: str, key: str
    ) -> None:
        """Let the routes answer, and keep the reply before it is sent."""
        caught = _Caught()
        messages: list[Message] = []

        async def catch(message: Message) -> None:
            messages.append(message)
            if message["type"] == "http.response.start":
                caught.status = message["status"]
                headers = dict(message["headers"])
                caught.etag = headers.get(b"etag", b"").decode("latin-1")
            elif message["type"] == "http.response.body":
                caught.body += message.get("body", b"")

        try:
            await self._app(scope, receive, catch)
        finally:
            # Also when the route failed or the client left: the key must not stay taken.
            await asyncio.shield(asyncio.to_thread(self._end, actor, key, caught))
        for message in messages:
            await send(message)

    def _begin(self, actor: str, key: str, mark: str) -> StoredReply | None:
        now = self._clock()
        with self._database.write() as session:
            return begin(session, actor=actor, key=key, mark=mark, now=now)

    def _end(self, actor: str, key: str, caught: _Caught) -> None:
        try:
            with self._database.write() as session:
                end(session, actor=actor, key=key, caught=caught)
        except StoreError as error:
            # The change is made; the key is free again after TAKEN_S.
            log.warning("idempotent_reply_not_kept", error=str(error))


def key_of(scope: Scope) -> str | None:
    """Return the request's key; None when it has none. Raises: UnreadableError."""
    found = [value for name, value in scope["headers"] if name == HEADER]
    if not found:
        return None
    key = bytes(found[0]).decode("latin-1")
    if len(found) > 1 or not (key.isascii() and key.isprintable() and key.strip()):
        raise UnreadableError("header idempotency-key: send one, of printable ASCII characters")
    if len(key) > MAX_CHARACTERS:
        raise UnreadableError(f"header idempotency-key: has more than {MAX_CHARACTERS} characters")
    return key


def fingerprint(scope: Scope, body: bytes) -> str:
    """Return the digest of what a request asks for."""
    parts = (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def begin(session: Session, *, actor: str, key: str, mark: str, now: float) -> StoredReply | None:
    """Take a key, or return the reply that is stored under it, in the caller's transaction.

    Raises: KeyReusedError, KeyInUseError.
    """
    session.execute(delete(IdempotentReplyRow).where(IdempotentReplyRow.at < now - KEPT_S))
    row = session.get(IdempotentReplyRow, (actor, key))
    if row is not None and row.fingerprint != mark:
        raise KeyReusedError("this Idempotency-Key was sent with another request; take a new one")
    if row is not None and row.status is not None:
        return StoredReply(row.status, row.etag, row.body)
    if row is not None and 0.0 <= now - row.at < TAKEN_S:
        raise KeyInUseError("the first request with this Idempotency-Key is not answered yet")
    if row is None:
        _make_room(session)
        row = IdempotentReplyRow(actor=actor, key=key, fingerprint=mark, status=None)
        session.add(row)
    row.at = now
    return None


def end(session: Session, *, actor: str, key: str, caught: _Caught) -> None:
    """Keep a success under its key; free the key of anything else."""
    row = session.get(IdempotentReplyRow, (actor, key))
    if row is None:
        return
    if not 200 <= caught.status < 300:
        session.delete(row)
        return
    row.status, row.etag, row.body = caught.status, caught.etag, caught.body.decode()


def _make_room(session: Session) -> None:
    excess = (session.scalar(select(func.count()).select_from(IdempotentReplyRow)) or 0) + 1
    excess -= MAX_ROWS
    if excess <= 0:
        return
    oldest = select(IdempotentReplyRow).order_by(IdempotentReplyRow.at).limit(excess)
    for row in session.scalars(oldest).all():
        session.delete(row)


def _replay(stored: StoredReply) -> Response:
    headers = {REPLAYED: "true", **({"etag": stored.etag} if stored.etag else {})}
    return Response(stored.body, stored.status, headers, "application/json")


async def _whole_body(receive: Receive) -> bytes:
    """Return the body, which `reception` has read already and hands on in one part."""
    return bytes((await receive()).get("body", b""))


def _given(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again
