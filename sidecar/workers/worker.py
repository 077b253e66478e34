"""The parent-death guard of a worker, and its messages to and from the parent.

Both talk over a socket pair, one word and perhaps a number on each line:
    worker -> parent    ready | probed | draining
    parent -> worker    take N | leave N    (accept connections of listener N, or stop doing so)
                        leaving             (all end soon: tell those who probe)
The end of the stream means that the parent has died; then the worker drains briefly and ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable

import structlog

from sidecar.processes.probes import Readiness
from sidecar.relay.client.server import RelayServer
from sidecar.workers.handover import DRAINING, LEAVE, LEAVING, TAKE, Handover, close_all

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
