"""Allow one process of a kind for each `state_dir`, by a lock that the kernel releases with it.

`up`, ingest (the outbox has one reader), the learner's schedule and control take a lock. The proxy
has its port instead, and several scoring processes may share a store.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from sidecar.errors import StateLockError

log = structlog.get_logger()


@contextmanager
def only_one(state_dir: Path, name: str) -> Iterator[None]:
    """Hold the lock of `sidecar <name>`. Raises: StateLockError when another process holds it."""
    descriptor = _open(state_dir, name)
    try:
        if not _locked(descriptor, state_dir):
            raise StateLockError(
                f"`sidecar {name}` runs already ({_holder(descriptor)}) with state_dir "
                f"{state_dir.resolve()}; stop it first, or give this one a state_dir, a bus.url "
                "and a store.url of its own"
            )
        _note_holder(descriptor)
        yield
    finally:
        os.close(descriptor)


def holder(state_dir: Path, name: str) -> str | None:
    """Return who holds the lock, in words; None when it is free. Raises: StateLockError."""
    descriptor = _open(state_dir, name)
    try:
        return None if _locked(descriptor, state_dir) else _holder(descriptor)
    finally:
        os.close(descriptor)


def _open(state_dir: Path, name: str) -> int:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Never removed: another process may just have locked it.
        return os.open(state_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateLockError(
            f"state_dir {state_dir.resolve()} cannot be written ({error.strerror}); make it "
            "writable, or set another state_dir"
        ) from error


def _locked(descriptor: int, state_dir: Path) -> bool:
    """Take the lock if it is free, and return whether that worked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StateLockError(
            f"state_dir {state_dir.resolve()} cannot be locked ({error.strerror}); set a "
            "state_dir on a local disk"
        ) from error
    return True


def _holder(descriptor: int) -> str:
    pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
    return f"pid {pid}" if pid.isdigit() else "pid not known"


def _note_holder(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:  # a full disk: the lock holds without the text
        log.warning("lock_holder_not_noted", why=str(error))
