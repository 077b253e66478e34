"""Clients that ask every proxy all the time, and remember who answered when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_S = 0.01
"""Between two requests of one client."""
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    proxy: int
    sent_at: float
    done_at: float
    """Both on the monotonic clock."""
    adapter: str
    """`x-sidecar-adapter`; empty when the request failed."""
    error: str
    """Empty for a 200."""


class Load:
    """`clients` clients for each proxy, each a session of its own on a kept connection."""

    def __init__(self, ports: Sequence[int], clients: int) -> None:
        self.replies: list[Reply] = []
        self._stop = False
        self._tasks = [
            asyncio.create_task(self._client(proxy, port, number))
            for proxy, port in enumerate(ports)
            for number in range(clients)
        ]

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _client(self, proxy: int, port: int, number: int) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        asked = 0
        while not self._stop:
            asked += 1
            sent_at = time.monotonic()
            adapter, error = "", ""
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    if connection is None:
                        connection = await asyncio.open_connection("127.0.0.1", port)
                    status, adapter = await _ask(*connection, f"p{proxy}-c{number}-{asked}")
                if status != 200:
                    error = str(status)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as problem:
                connection, error = None, type(problem).__name__
            done = time.monotonic()
            self.replies.append(Reply(proxy, sent_at, done, "" if error else adapter, error))
            await asyncio.sleep(PAUSE_S)
        if connection is not None:
            connection[1].close()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: str
) -> tuple[int, str]:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": session}]}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"x-sidecar-session: %b\r\ncontent-length: %d\r\n\r\n%b"
        % (session.encode(), len(body), body)
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    named = {key.lower(): value for key, _, value in (one.partition(": ") for one in head[1:])}
    await reader.readexactly(int(named["content-length"]))
    return int(head[0].split(" ")[1]), named.get("x-sidecar-adapter", "")
