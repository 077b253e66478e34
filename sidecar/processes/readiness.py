"""A process tells `sidecar up`, which started it, that it works: a line through an inherited pipe.

Only a child of this very start has the pipe, so what somebody else serves on the same port is never
mistaken for it.
"""

from __future__ import annotations

import os
import stat

import structlog

VARIABLE = "SIDECAR_READY_FD"
"""Names the descriptor of the pipe."""
_READY = "ready"

log = structlog.get_logger()


def tell_ready(address: str = "") -> None:
    """Tell it once. Does nothing in a process that a person started.

    address: the base URL at which this process listens.
    """
    number = os.environ.pop(VARIABLE, "")  # what this process starts has no such pipe
    if not number.isdigit():
        return
    descriptor = int(number)
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.write(descriptor, f"{_READY} {address}\n".encode())
            os.close(descriptor)
    except (OSError, OverflowError) as error:
        log.warning("ready_not_told", why=str(error))


def read_ready(descriptor: int) -> str | None:
    """What the child told through the non-blocking end of its pipe: its address, or "" without
    one. None: nothing yet."""
    try:
        line = os.read(descriptor, 1_000).decode("utf-8", "replace")
    except BlockingIOError:
        return None
    word, _, address = line.strip().partition(" ")
    return address if word == _READY else None
