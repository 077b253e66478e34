"""A server between two others that passes bytes on: it keeps what it saw, or changes a word."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from socket import SHUT_WR, create_connection, socket
from urllib.parse import urlsplit


@dataclass(kw_only=True)
class Connection:
    """What went through one connection since it was last forgotten."""

    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)


@dataclass(kw_only=True)
class Between:
    """What went through."""

    url: str = ""
    connections: list[Connection] = field(default_factory=list)

    def forget(self) -> None:
        """Forget all that was seen; connections stay open."""
        for connection in self.connections:
            connection.asked.clear()
            connection.answered.clear()

    def find(self, mark: bytes) -> Connection | None:
        """The connection on which this was asked; None when it never came here."""
        found = [connection for connection in self.connections if mark in connection.asked]
        assert len(found) <= 1, "asked twice"
        return found[0] if found else None


def unchanged(data: bytes) -> bytes:
    return data


@contextlib.contextmanager
def between(url: str, change: Callable[[bytes], bytes] = unchanged) -> Iterator[Between]:
    """Listen, and pass on to `url`. change: applied to replies, piece by piece."""
    where = urlsplit(url)
    seen = Between()

    class PassOn(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            kept = Connection()
            seen.connections.append(kept)
            with create_connection((where.hostname, where.port)) as upstream:
                replies = threading.Thread(
                    target=_pass_on, args=(upstream, self.request, change, kept.answered)
                )
                replies.start()
                _pass_on(self.request, upstream, unchanged, kept.asked)
                replies.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), PassOn) as server:
        server.daemon_threads = True
        server.block_on_close = False  # a proxy may keep its connections for longer than the test
        seen.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()


def _pass_on(
    source: socket, target: socket, change: Callable[[bytes], bytes], kept: bytearray
) -> None:
    with contextlib.suppress(OSError):  # one side is gone: the other side's reader tells
        while data := source.recv(65_536):
            kept += data  # before it is passed on, so a client that has the reply finds it here
            target.sendall(change(data))
        target.shutdown(SHUT_WR)
