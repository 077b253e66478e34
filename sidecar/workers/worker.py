"""What the parent hands to each worker: listeners, shared memory, a socket to the parent.

It is passed as one hidden command-line argument; the worker inherits the descriptors that it names.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog

from sidecar.metrics.families import MetricTable, map_regions
from sidecar.processes import Readiness
from sidecar.relay.server import RelayServer

READY, PROBED, DRAINING, TAKE, LEAVE = "ready", "probed", "draining", "take", "leave"
LEAVING = "leaving"
"""The words of the protocol between a worker and its parent (`sidecar.workers.worker`)."""
BALANCER_S = 5.0
"""How long a load balancer that probes is given to stop sending, where `proxy.shutdown_delay_s` is
not set: HAProxy needs three probes 2 s apart, Kubernetes about a second."""
PARENT_REGION = 0
"""The region of the metrics' memory that the parent writes; a worker writes the one of its slot.
The last regions are those of the breakers, one for each line of adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What one worker needs to know and to inherit."""

    port: int
    slot: int
    """1 and up; no two living workers share one. Numbers the worker's socket and metrics region."""
    listener: int
    """Index of the worker's own listener in `listeners`."""
    listeners: tuple[tuple[int, ...], ...]
    """Descriptors of every worker's listening sockets, one for each address of the host."""
    control: int
    """Descriptor of the socket to the parent; it closes when the parent dies."""
    metrics: int
    """Descriptor of the shared memory of all workers' metrics."""
    lines: tuple[str, ...] = ()
    """Names of the lines of adapters that have a breaker in that memory, in the order of its last
    regions."""
    limits: int | None = None
    """Descriptor of the shared memory of keys' limits; None unless `access.mode` is `keys`."""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    def descriptors(self) -> tuple[int, ...]:
        """All descriptors that the worker must inherit."""
        listeners = (fd for one in self.listeners for fd in one)
        limits = () if self.limits is None else (self.limits,)
        return (*listeners, self.control, self.metrics, *limits)

    def table(self) -> tuple[MetricTable, list[memoryview], dict[str, memoryview]]:
        """This worker's metrics, the regions of all others, and the memory of each line's
        breaker."""
        regions = map_regions(self.metrics)
        first = len(regions) - len(self.lines)
        breakers = dict(zip(self.lines, regions[first:], strict=True))
        del regions[first:]
        own = regions.pop(self.slot)
        return MetricTable(own), regions, breakers


def decode_handover(text: str) -> Handover:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(text, type=Handover)


def bind_listeners(host: str, port: int, count: int) -> list[tuple[socket.socket, ...]]:
    """`count` listeners that share one port, each with a socket for every address of the host. The
    kernel spreads new connections over them (SO_REUSEPORT). Raises: OSError, also when any other
    process listens there: SO_REUSEPORT alone would let two proxies of one user share a port."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if port:
        for family, address in addresses:
            _bind(family, address, port, shared=False).close()
    listeners: list[tuple[socket.socket, ...]] = []
    try:
        for _ in range(count):
            sockets = []
            for family, address in addresses:
                sockets.append(_bind(family, address, port, shared=True))
                port = sockets[-1].getsockname()[1]
            listeners.append(tuple(sockets))
    except OSError:
        close_all(listeners)
        raise
    return listeners


def cannot_listen(name: str, host: str, port: int, error: OSError) -> str:
    """Say that an address cannot be bound, and what to do. name: its table in the settings."""
    # asyncio adds the address to `strerror`; an unresolved host's number is not the system's errno.
    why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return (
        f"cannot listen on {name}.host {host}, {name}.port {port} ({why}); stop what listens "
        f"there, or set another {name}.port"
    )


def close_all(listeners: Iterable[Iterable[socket.socket]]) -> None:
    for sockets in listeners:
        for one in sockets:
            one.close()


def _bind(
    family: socket.AddressFamily, address: tuple[object, ...], port: int, *, shared: bool
) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address[0], port, *address[2:]))
        if shared:
            made.listen()
    except OSError:
        made.close()
        raise
    return made


# The parent-death guard of a worker, and its messages to and from the parent.

log = structlog.get_logger()
ORPHAN_DRAIN_S = 1.0
"""How long replies in flight may continue after the parent died."""
ORPHAN_EXIT_S = 1.8
"""An orphan that has not ended after this long is killed: the next parent needs its port."""
EXIT_ORPHANED = 3


class ParentLine:
    """The worker's end of the socket pair: `open`, `say`, `close`."""

    def __init__(self, handover: Handover, relay: RelayServer, readiness: Readiness) -> None:
        self._handover = handover
        self._readiness = readiness
        self._relay = relay
        self.orphaned = False
        self._line = socket.socket(fileno=handover.control)
        self.listeners = [
            tuple(socket.socket(fileno=fd) for fd in one) for one in handover.listeners
        ]
        self._task: asyncio.Task[None] | None = None

    @property
    def own(self) -> tuple[socket.socket, ...]:
        return self.listeners[self._handover.listener]

    def open(self, gone: Callable[[], None] | None) -> None:
        """gone: called once when the parent has died."""
        self._line.setblocking(False)
        self._task = asyncio.create_task(self._follow(gone))

    def say(self, word: str) -> None:
        """Send one word. A dead parent is noticed by `_follow`, so an error here is only logged."""
        try:
            self._line.send(f"{word}\n".encode())
        except OSError as error:
            log.warning("parent_not_told", word=word, why=str(error))

    def drain(self) -> None:
        """Leave new connections to the other workers."""
        self.say(DRAINING)
        close_all(self.listeners)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _follow(self, gone: Callable[[], None] | None) -> None:
        loop = asyncio.get_running_loop()
        buffer = b""
        while data := await self._receive(loop):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                await self._obey(line.decode())
        log.error("parent_gone", slot=self._handover.slot)
        self.orphaned = True
        end_within(ORPHAN_EXIT_S)
        if gone is not None:
            gone()

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> bytes:
        try:
            return await loop.sock_recv(self._line, 4096)
        except ConnectionError:
            return b""

    async def _obey(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == TAKE:
            await self._relay.accept_also(int(number), self.listeners[int(number)])
        elif word == LEAVE:
            self._relay.accept_no_more(int(number))
        elif word == LEAVING:
            self._readiness.leaving = True
        log.debug("parent_said", line=line)


def end_within(seconds: float) -> None:
    """End the process after so many seconds, even if its event loop is blocked."""
    timer = threading.Timer(seconds, os._exit, (EXIT_ORPHANED,))
    timer.daemon = True
    timer.start()
