"""Ports for servers that start later, as vLLM does half a minute after its port was chosen."""

from __future__ import annotations

import socket


def free_port(preferred: int = 0, *, followers: int = 0) -> int:
    """A loopback port that stays reserved until this process ends: the preferred one if it is free.

    `followers` is how many of the next ports are reserved with it. A socket that does not listen is
    bound to each. So connections are refused until a server listens there, which has to set
    SO_REUSEADDR, as asyncio, uvicorn, vLLM, torch and Java do; and the kernel gives the port to
    nobody who asks for any. Raises OSError when there is none.
    """
    wanted = preferred
    while True:
        held = [socket.socket() for _ in range(1 + followers)]
        try:
            for number, one in enumerate(held):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(("127.0.0.1", wanted + number if wanted else 0))
                wanted = wanted or one.getsockname()[1]
        except (OSError, OverflowError):
            for one in held:
                one.close()
            if wanted:  # another first port may do
                wanted = 0
                continue
            raise
        for one in held:
            one.detach()  # its descriptor is open until the process ends
        return wanted
