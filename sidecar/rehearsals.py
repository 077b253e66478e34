"""Tickets of rehearsals: by them the proxy knows attempts at recorded tasks from users' requests.

A ticket is signed with a secret that the sidecar made, for one session, task, project and adapter,
until a time; it names no key and no person. It travels in `x-sidecar-rehearsal`, beside the session
and the task in their own headers: where one of them is not the signed one, or the ticket is too
old, the request is refused. So a runner can send nothing else with it, and no client can pass for a
rehearsal.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from sidecar.bounds import PROJECT

REHEARSAL_HEADER: Final = b"x-sidecar-rehearsal"
SESSION_HEADER: Final = b"x-sidecar-session"
TASK_HEADER: Final = b"x-sidecar-task"
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


def write_ticket(secret: bytes, attempt: Attempt) -> str:
    """Sign an attempt."""
    return f"{attempt.expires_at}:{attempt.project}:{_sign(secret, attempt)}:{attempt.adapter}"


def attempt_headers(secret: bytes, attempt: Attempt) -> dict[str, str]:
    """Return the headers that each request of the attempt has to carry."""
    return {
        SESSION_HEADER.decode(): attempt.session,
        TASK_HEADER.decode(): attempt.task,
        REHEARSAL_HEADER.decode(): write_ticket(secret, attempt),
    }


def read_ticket(
    secret: bytes, ticket: bytes, *, session: bytes, task: bytes, now: float
) -> Attempt | None:
    """Return the attempt of a request; None when the ticket is not for it, or is too old.

    ticket, session, task: values of the three headers. now: Unix seconds.
    """
    try:
        expires, project, mac, adapter = ticket[:LONGEST_TICKET].decode("ascii").split(":", 3)
        attempt = Attempt(
            session=session.decode(),
            task=task.decode(),
            project=project,
            adapter=adapter,
            expires_at=int(expires),
        )
    except ValueError:  # UnicodeDecodeError is one
        return None
    if not hmac.compare_digest(mac, _sign(secret, attempt)) or now >= attempt.expires_at:
        return None
    return attempt if PROJECT.fullmatch(project) else None


def _sign(secret: bytes, attempt: Attempt) -> str:
    parts = (str(attempt.expires_at), attempt.project, attempt.adapter)
    text = "\0".join((*parts, attempt.session, attempt.task))
    return hmac.new(secret, text.encode(), sha256).hexdigest()[:MAC_DIGITS]


def make_secret(state_dir: Path) -> bytes:
    """Return the secret of this `state_dir`, and make it if there is none. Raises: OSError."""
    path = state_dir / FILE
    found = find_secret(state_dir)
    if found is None:
        state_dir.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{FILE}.{os.getpid()}")
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
        try:
            os.link(own, path)  # whole, or not at all; another process may have been first
        except FileExistsError:
            if find_secret(state_dir) is None:  # damaged
                own.replace(path)
        own.unlink(missing_ok=True)
        found = find_secret(state_dir)
    if found is None:
        raise OSError(f"{path} cannot be read back")
    return found


def find_secret(state_dir: Path) -> bytes | None:
    """Return the secret; None where nothing was ever rehearsed, or the file is damaged."""
    try:
        found = (state_dir / FILE).read_bytes()
    except OSError:
        return None
    return found if len(found) == SECRET_BYTES else None


class Tickets:
    """Reads tickets, for one thread. The secret's file is read with the first one."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._secret: bytes | None = None

    def read(self, shown: Mapping[bytes, bytes], now: float) -> Attempt | None:
        """Return the attempt whose headers these are; None when they hold no valid ticket.

        shown: headers by lower-case name.
        """
        if self._secret is None:
            self._secret = find_secret(self._state_dir)
        if self._secret is None:
            return None
        return read_ticket(
            self._secret,
            shown.get(REHEARSAL_HEADER, b"").strip(),
            session=shown.get(SESSION_HEADER, b"").strip(),
            task=shown.get(TASK_HEADER, b"").strip(),
            now=now,
        )
