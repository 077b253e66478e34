"""Report to `sidecar up` that a child process works, by a line through an inherited pipe.

Only a child of this start has the pipe, so another program on the same port is never taken for it.
"""

from __future__ import annotations

import os
import stat

import structlog

VARIABLE = "SIDECAR_READY_FD"
"""Environment variable with the descriptor of the pipe."""
_READY = "ready"

log = structlog.get_logger()


def tell_ready(address: str = "") -> None:
    """Report readiness once. Does nothing in a process that a person started.

    address: the base URL at which this process listens.
    """
    number = os.environ.pop(VARIABLE, "")  # children of this process do not inherit the pipe
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
    """Read the address that the child reported through its non-blocking pipe; "" when it has none.
    Returns: None when there was no report yet."""
    try:
        line = os.read(descriptor, 1_000).decode("utf-8", "replace")
    except BlockingIOError:
        return None
    word, _, address = line.strip().partition(" ")
    return address if word == _READY else None
