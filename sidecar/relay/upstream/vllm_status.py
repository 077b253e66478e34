"""The few requests that the sidecar itself sends to vLLM.

Asked over connections like the relay's, not by an HTTP client: the loop that asks is the one that
relays, and httpx keeps it busy for 3 ms a question, these for 0.1.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import structlog

from sidecar.errors import UpstreamError
from sidecar.relay.http1.heads import request_lines
from sidecar.relay.http1.reply_parser import ReplyHead, ReplyReader
from sidecar.relay.upstream.connection import UpstreamPool, endpoint

log = structlog.get_logger()
TIMEOUT_S = 2.0
MAX_BODY_BYTES = 16 * 2**20
"""A longer reply is not accepted as a list of models."""
AGENT = "learning-sidecar"


@dataclass(frozen=True, slots=True)
class ModelsReply:
    """vLLM's answer to `GET /v1/models`."""

    status: int
    body: dict[str, Any]  # Any: the cards are passed on as they are


class VllmStatus:
    """One vLLM. Close it at the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = UpstreamPool(endpoint(url), connect_timeout_s=TIMEOUT_S)

    async def reachable(self) -> bool:
        """True if vLLM answers that it is healthy."""
        try:
            status, _ = await self._ask(b"/health", ())
        except UpstreamError as error:
            log.debug("vllm_unreachable", url=self.url, why=str(error))
            return False
        return status == 200

    async def models(self, authorization: str | None, *, agent: str = AGENT) -> ModelsReply | None:
        """vLLM's model list, asked with this key; None when it gives none.

        agent: who asks, as vLLM's log will show it.
        """
        lines = [b"User-Agent: " + agent.encode()]
        if authorization is not None:
            lines.append(b"Authorization: " + authorization.encode("utf-8", "surrogateescape"))
        try:
            status, text = await self._ask(b"/v1/models", lines)
            body = json.loads(text)
        except (UpstreamError, ValueError, RecursionError) as error:  # the last: nested too deeply
            log.debug("vllm_unreachable", url=self.url, why=str(error))
            return None
        return ModelsReply(status, body) if isinstance(body, dict) else None

    async def close(self) -> None:
        self._pool.close()

    async def _ask(
        self, target: bytes, lines: tuple[bytes, ...] | list[bytes]
    ) -> tuple[int, bytes]:
        """Status and body. Raises: UpstreamError."""
        where = self._pool.endpoint
        head = request_lines(b"GET", where.prefix + target, lines, host=where.authority)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await self._try(head, reuse=True)
                if reply is None:  # the server had closed the kept connection
                    reply = await self._try(head, reuse=False)
        except TimeoutError as error:
            raise UpstreamError(f"no answer within {TIMEOUT_S:g} s") from error
        if reply is None:
            raise UpstreamError("the connection was closed as soon as it was open")
        return reply

    async def _try(self, head: bytes, *, reuse: bool) -> tuple[int, bytes] | None:
        """One try. None: the connection was closed before any byte of the reply."""
        connection = self._pool.take_idle() if reuse else None
        if connection is None:
            connection = await self._pool.connect()
            if not connection.usable:
                return None
        reply = _Reply()
        connection.send(reply, head + b"\r\n\r\n", b"", head_only=False)
        try:
            return await reply.ended
        finally:
            if not reply.whole:
                connection.abort()


class _Reply(ReplyReader):
    """Reads one reply."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[tuple[int, bytes] | None] = (
            asyncio.get_running_loop().create_future()
        )
        self.whole = False
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def reply_head(self, head: ReplyHead) -> None:
        self._status = head.status

    def reply_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_BODY_BYTES:
            self._pieces.append(data)
        elif not self.ended.done():
            self.ended.set_exception(UpstreamError(f"more than {MAX_BODY_BYTES} bytes came"))

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return False

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        if complete:
            self.whole = True
            if not self.ended.done():
                self.ended.set_result((self._status, b"".join(self._pieces)))

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        self.whole = True  # there is nothing left to abort
        if self.ended.done():
            return
        if nothing_came:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(UpstreamError(why))
