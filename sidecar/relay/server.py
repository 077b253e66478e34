"""The relay's server: it listens, keeps its connections, and drains them when it stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from operator import itemgetter
from time import perf_counter

import structlog

from sidecar.processes import connections_that_fit
from sidecar.relay import client
from sidecar.relay.client import ClientConnection
from sidecar.relay.context import RelayContext

log = structlog.get_logger()
BACKLOG = 2048
OWN = -1
"""Key of this process's own listeners."""
LISTEN_GRACE_S = 0.05
"""How long a connection that was accepted as the listener closed may take to send its request,
before connections without a request are closed."""
LONGEST_TICK_S = 1.0
"""Longest interval between two checks of the connections' timeouts."""
MAX_CONNECTIONS = 4096
"""Client connections of one worker; for a further one the idlest is closed."""
FILES_EACH = 2
"""Files that a connection needs: its own, and one to vLLM."""
ALL_BUSY_S = 0.01
"""When no connection was idle, none is looked for again for so long: looking at 4,096 takes about a
millisecond."""


class TurnedAway(asyncio.Protocol):
    """Closes a connection for which there is no room as soon as it is accepted."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class RelayServer:
    """`start`, then `stop`."""

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._most = MAX_CONNECTIONS
        self._idlest: list[tuple[float, ClientConnection]] = []
        """The idlest quarter of the connections when last looked for, with `idle_s`; the idlest is
        the last."""
        self._all_busy_until = 0.0
        self._connections: set[ClientConnection] = set()
        self._emptied = asyncio.Event()
        self._ticking: asyncio.TimerHandle | None = None
        shortest_s = min(
            client.HEAD_TIMEOUT_S, client.BODY_TIMEOUT_S, client.WRITE_TIMEOUT_S,
            client.IDLE_TIMEOUT_S, context.proxy.upstream_timeout_s,
        )  # fmt: skip
        self._tick_s = min(max(shortest_s / 4, 0.02), LONGEST_TICK_S)
        self._servers: dict[int, list[asyncio.Server]] = {}
        self._stopping = False

    async def start(self, sockets: Sequence[socket.socket] | None = None) -> int:
        """Listen: on the sockets given, bound already, or by the settings. Returns: the port (which
        matters when the setting is 0). Raises: OSError."""
        proxy = self._context.proxy
        self._most = connections_that_fit(MAX_CONNECTIONS, files_each=FILES_EACH)
        if self._most < MAX_CONNECTIONS:
            log.warning(
                "max_connections_lowered",
                to=self._most,
                wanted=MAX_CONNECTIONS,
                why="the hard limit of open files leaves room for no more",
                to_do="raise it (`ulimit -Hn`, LimitNOFILE)",
            )
        if sockets is not None:
            await self.accept_also(OWN, sockets)
        else:
            self._servers[OWN] = [
                await asyncio.get_running_loop().create_server(
                    self._accept, proxy.host, proxy.port, backlog=BACKLOG
                )
            ]
        self._tick()
        port: int = self._servers[OWN][0].sockets[0].getsockname()[1]
        return port

    async def accept_also(self, name: int, sockets: Sequence[socket.socket]) -> None:
        """Accept connections from these listeners too, until `accept_no_more(name)`. Does nothing
        once the relay is stopping. Raises: OSError."""
        if self._stopping or name in self._servers:
            return
        servers = self._servers[name] = []
        for one in sockets:
            # A duplicate: closing it leaves the listener and its backlog to the owner.
            server = await asyncio.get_running_loop().create_server(
                self._accept, sock=one.dup(), backlog=BACKLOG
            )
            servers.append(server)

    def accept_no_more(self, name: int) -> None:
        for server in self._servers.pop(name, []):
            server.close()

    async def stop(self, deadline_s: float) -> None:
        """Take no new connections, let replies in flight finish, cut the rest at the deadline."""
        self._stopping = True
        await asyncio.sleep(0)  # one iteration of the loop accepts what is in the backlog
        for name in list(self._servers):
            self.accept_no_more(name)
        if self._connections:
            await asyncio.sleep(min(LISTEN_GRACE_S, deadline_s))
        if not await self._drained(deadline_s):
            log.warning("requests_cut_at_drain_deadline", count=len(self._connections))
            for connection in list(self._connections):
                connection.abort()
            # Their flights settle when the loop has called `connection_lost`.
            await self._drained(1.0)
        if self._ticking is not None:
            self._ticking.cancel()
        self._context.replicas.close()
        self._context.app.pool.close()

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

    def _tick(self) -> None:
        now = perf_counter()
        for connection in list(self._connections):
            connection.tick(now)
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _accept(self) -> asyncio.Protocol:
        if len(self._connections) >= self._most:
            made_room = self._make_room()
            self._context.metrics.clients_cut.inc(("made_room" if made_room else "too_many",))
            self._context.rate_limited_log.warning(
                "too_many_connections", limit=self._most, closed="idlest" if made_room else "newest"
            )
            if not made_room:
                return TurnedAway()
        connection = ClientConnection(self._context, self._forget)
        self._connections.add(connection)
        return connection

    def _make_room(self) -> bool:
        """Close the idlest connection. Returns: False when all are at work."""
        now = perf_counter()
        if self._close_idlest(now):
            return True
        if now < self._all_busy_until:
            return False
        found = [(one.idle_s(now), one) for one in self._connections]
        idle = sorted((one for one in found if one[0] >= 0.0), key=itemgetter(0))
        # The order of a quarter still holds when new connections have taken its place.
        self._idlest = idle[-(len(idle) // 4 + 1) :]
        closed = self._close_idlest(now)
        if not closed:
            self._all_busy_until = now + ALL_BUSY_S
        return closed

    def _close_idlest(self, now: float) -> bool:
        while self._idlest:
            idle_s, one = self._idlest.pop()
            # One that did something since is less idle than it was.
            if one in self._connections and one.idle_s(now) >= idle_s and one.make_room():
                return True
        return False

    def _forget(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()
