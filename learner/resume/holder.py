"""Who holds the lease of a run, and whether that process is gone.

A process is known by its pid and its start time, which the kernel never gives twice between two
starts of the machine. Both say something only on the same start of the same machine, in the same
pid namespace; anywhere else nothing can be told, and the lease has to run out. Linux only: without
`/proc` nothing can be told either.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEAD = ("Z", "X", "x")
"""States of a process that has ended and was not waited for yet (proc(5))."""
Released = Literal["stopped", "broken"]
"""Why a holder gave its lease back before the run's end: it was asked to stop, or a process that it
needs was gone."""
RELEASED = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that runs a training run."""

    token: str
    """Random: no two holders of a lease have the same."""
    host: str
    """Name of the machine, for people."""
    machine: str
    """Its start and the pid namespace; "" where that is not known."""
    pid: int
    started: int
    """In clock ticks after the start of the machine; 0: not known."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def present_holder() -> Holder:
    """Return this process as a holder."""
    pid = os.getpid()
    return Holder(
        token=uuid.uuid4().hex,
        host=platform.node(),
        machine=_machine(),
        pid=pid,
        started=_start_time(pid) or 0,
    )


def released(stored: object, how: Released) -> dict[str, Any]:
    """Return a stored holder (JSON of a `Holder`) that has given its lease back."""
    return {**(stored if isinstance(stored, Mapping) else {}), RELEASED: how}


def how_released(stored: object) -> Released | None:
    """Return how a stored holder gave its lease back; None: it did not."""
    how = stored.get(RELEASED) if isinstance(stored, Mapping) else None
    return how if how in ("stopped", "broken") else None


def is_gone(stored: object) -> bool:
    """Return True when the process of a stored holder has given its lease back, or has certainly
    ended.

    stored: JSON of a `Holder`; False for anything else.
    """
    if not isinstance(stored, Mapping):
        return False
    if how_released(stored) is not None:
        return True
    pid, started = stored.get("pid"), stored.get("started")
    if type(pid) is not int or type(started) is not int or started <= 0:
        return False
    here = _machine()
    return bool(here) and stored.get("machine") == here and _start_time(pid) != started


def _machine() -> str:
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux, or no /proc
        return ""


def _start_time(pid: int) -> int | None:
    """Return the start time of a living process; None when there is none of this pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets, and may hold both spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in _DEAD else int(fields[19])
