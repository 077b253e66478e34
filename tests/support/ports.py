"""Ports of 127.0.0.1 for processes that tests start, held so that nothing else is given them."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port that stays reserved until this process ends.

    A socket that does not listen is bound to it. So connections are refused until a server listens
    there, which has to set SO_REUSEADDR, as our processes, asyncio, uvicorn and torch do; and the
    kernel gives the port to nobody who asks for any.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = int(held.getsockname()[1])
    held.detach()  # its descriptor is open until the process ends
    return port
