"""Tickets of rehearsals: by them the proxy knows attempts at recorded tasks from users' requests.

A ticket is signed with a secret that the sidecar made, for one session, task, project and adapter,
until a time; it names no key and no person. It travels in `x-sidecar-rehearsal`, beside the session
and the task in their own headers: where one of them is not the signed one, or the ticket is too
old, the request is refused. So a runner can send nothing else with it, and no client can pass for a
rehearsal.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

REHEARSAL_HEADER: Final = b"x-sidecar-rehearsal"
SESSION_HEADER: Final = b"x-sidecar-session"
TASK_HEADER: Final = b"x-sidecar-task"
HEADERS: Final = (REHEARSAL_HEADER, SESSION_HEADER, TASK_HEADER)
FILE: Final = "rehearsal.key"
SECRET_BYTES: Final = 32
MAC_DIGITS: Final = 32
"""Hex digits of the signature: 128 bits."""
LONGEST_TICKET: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a ticket stands for."""

    session: str
    """As in `x-sidecar-session`."""
    task: str
    """As in `x-sidecar-task`: the exchange that the task begins with."""
    project: str
    adapter: str
    """The one that answers; vLLM's name of it, or "base"."""
    expires_at: int
    """Unix seconds."""


def attempt_headers(secret: bytes, attempt: Attempt) -> dict[str, str]:
    """Return the headers that each request of the attempt has to carry."""
    ticket = f"{attempt.expires_at}:{attempt.project}:{_sign(secret, attempt)}:{attempt.adapter}"
    return {
        SESSION_HEADER.decode(): attempt.session,
        TASK_HEADER.decode(): attempt.task,
        REHEARSAL_HEADER.decode(): ticket,
    }


def read_ticket(secret: bytes, shown: Mapping[bytes, bytes], now: float) -> Attempt | None:
    """Return the attempt of a request; None when its ticket is not for it, or is too old.

    shown: the three headers. now: Unix seconds.
    """
    try:
        ticket, session, task = (shown.get(name, b"").strip().decode() for name in HEADERS)
        expires, project, mac, adapter = ticket[:LONGEST_TICKET].split(":", 3)
        attempt = Attempt(
            session=session, task=task, project=project, adapter=adapter, expires_at=int(expires)
        )
    except ValueError:  # UnicodeDecodeError is one
        return None
    is_signed = hmac.compare_digest(mac.encode(), _sign(secret, attempt).encode())
    return attempt if is_signed and now < attempt.expires_at else None


def _sign(secret: bytes, attempt: Attempt) -> str:
    parts = (str(attempt.expires_at), attempt.project, attempt.adapter)
    text = "\0".join((*parts, attempt.session, attempt.task))
    return hmac.new(secret, text.encode(), sha256).hexdigest()[:MAC_DIGITS]


def make_secret(state_dir: Path) -> bytes:
    """Return the secret of this `state_dir`, and make it if there is none. Raises: OSError."""
    path = state_dir / FILE
    if not path.exists():
        state_dir.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{FILE}.{os.getpid()}")
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(own, path)  # whole, or not at all
        own.unlink()
    return path.read_bytes()


class Tickets:
    """Reads tickets, for one thread. The secret's file is read with the first one."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self._secret: bytes | None = None

    def read(self, shown: Mapping[bytes, bytes], now: float) -> Attempt | None:
        """As `read_ticket`."""
        if self._secret is None:
            with contextlib.suppress(OSError):
                self._secret = self._path.read_bytes()
        if self._secret is None or len(self._secret) != SECRET_BYTES:
            return None  # nothing was ever rehearsed, or the file is damaged
        return read_ticket(self._secret, shown, now)
