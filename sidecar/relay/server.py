"""The relay as a server: it listens, holds its connections, and ends without cutting anyone off."""

from __future__ import annotations

import asyncio

import structlog

from sidecar.relay.context import RelayContext
from sidecar.relay.http_client_side import ClientConnection

log = structlog.get_logger()
BACKLOG = 2048


class RelayServer:
    """`start`, then `stop`."""

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._connections: set[ClientConnection] = set()
        self._emptied = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen. Returns the port (which matters when the setting is 0). Raises OSError."""
        proxy = self._context.proxy
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, proxy.host, proxy.port, backlog=BACKLOG
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self, deadline_s: float) -> None:
        """Take no new connections, let replies in flight finish, cut the rest at the deadline."""
        if self._server is not None:
            self._server.close()
        if not await self._drained(deadline_s):
            log.warning("requests_cut_at_drain_deadline", count=len(self._connections))
            for connection in list(self._connections):
                connection.abort()
            # Their accounts are settled when the loop has told them.
            await self._drained(1.0)
        self._context.vllm.close()
        self._context.app.close()

    async def _drained(self, deadline_s: float) -> bool:
        self._emptied.clear()
        for connection in list(self._connections):
            connection.drain()
        if self._connections:
            try:
                await asyncio.wait_for(self._emptied.wait(), deadline_s)
            except TimeoutError:
                return False
        return True

    def _accept(self) -> ClientConnection:
        connection = ClientConnection(self._context, self._forget)
        self._connections.add(connection)
        return connection

    def _forget(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()
