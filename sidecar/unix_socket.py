"""Unix sockets at paths of any length: the kernel itself takes 107 bytes (unix(7); macOS 103)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 100
"""Bytes of a path that is given to the kernel as it is."""


@contextmanager
def kernel_path(path: Path) -> Iterator[str]:
    """Yield a name of this socket that `bind` and `connect` take. A longer path is reached through
    a descriptor of its folder, which needs Linux. Raises: OSError."""
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def bind(path: Path) -> socket.socket:
    """Return a socket bound to this path, in the place of one that a killed process left. It does
    not listen yet: until then nobody can connect. Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    with kernel_path(path) as name:
        listener.bind(name)
    path.chmod(0o600)
    return listener
