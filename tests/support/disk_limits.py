"""A disk without room, and a file of another group."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOM = 1_024
"""Bytes that a file may have on a full disk."""


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond `ROOM`: a write fails in its middle, as without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def other_group(path: Path) -> int:
    """Give a file to a group that is not the first one of this process, where it may, and return
    the group that it has."""
    others = [1234] if os.geteuid() == 0 else [one for one in os.getgroups() if one != os.getegid()]
    if others:
        os.chown(path, -1, others[0])
    return path.stat().st_gid
