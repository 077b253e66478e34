"""A worker's line to its parent: it says how it is, and is told which listeners to take care of.

One word and perhaps a number, a line each:
    worker -> parent    ready | draining
    parent -> worker    take N | leave N
The end of the line means that the parent is gone; then the worker ends too, soon.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable

import structlog

from sidecar.relay.client.server import RelayServer
from sidecar.workers.handover import DRAINING, LEAVE, TAKE, Handover, close_all

log = structlog.get_logger()
ORPHAN_DRAIN_S = 1.0
"""How long replies in flight may go on when the parent was killed."""
ORPHAN_EXIT_S = 1.8
"""After this long an orphan that has not ended is ended: the next parent wants its port."""
EXIT_ORPHANED = 3


class ParentLine:
    """The worker's end. `open` it, `say` on it, `close` it."""

    def __init__(self, handover: Handover, relay: RelayServer) -> None:
        self._handover = handover
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
        """gone: called once when the parent is gone."""
        self._line.setblocking(False)
        self._task = asyncio.create_task(self._follow(gone))

    def say(self, word: str) -> None:
        """Tell the parent. One that is gone is told by the end of the line, not here."""
        try:
            self._line.send(f"{word}\n".encode())
        except OSError as error:
            log.warning("parent_not_told", word=word, why=str(error))

    def drain(self) -> None:
        """Leave new connections to the others."""
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
        log.debug("parent_said", line=line)


def end_within(seconds: float) -> None:
    """End the process then, whatever the loop is doing."""
    timer = threading.Timer(seconds, os._exit, (EXIT_ORPHANED,))
    timer.daemon = True
    timer.start()
