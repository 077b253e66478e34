"""Write files that are whole or not there, also on a full disk: settings, keys, exports."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """Open a new file that only its owner can read. One that is not finished is removed.

    Raises: FileExistsError; OSError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def replace_file(path: Path, text: str, *, rights: int = 0o777) -> None:
    """Write a file in place of one that may exist, which stays as it is when this fails.

    The new one has the owner, the group and the mode of the old one (0600 when there was none), and
    of a link the target is replaced. rights: bits of the mode that may be kept. Raises: OSError.
    """
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if target.exists():
                _take_rights(descriptor, target.stat(), rights)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time change files in the folder of this one. Raises: OSError."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _take_rights(descriptor: int, old: os.stat_result, rights: int) -> None:
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & rights)
