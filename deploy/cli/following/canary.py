"""Look at a canary until it has ended, and say in lines what has changed between two looks.

`sidecar canary wait` needs the last look, `sidecar canary watch` all of them. Neither bridges an
admin API that is away: who waits is told so, and decides.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from deploy.iso_times import iso
from deploy.records import version_of

Json = Mapping[str, Any]

EXITS = {"promoted": 0, "rolled_back": 1, "rejected": 1, "inconclusive": 3, "withdrawn": 3}
"""State of a canary that has ended -> exit code."""
EVERY_S = 1.0
QUIET_S = 60.0
"""Time after which a canary without a change is told again."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Reader(Protocol):
    """Reads a resource of the admin API."""

    def get(self, *path: str) -> Any: ...  # Any: JSON


def looks(
    client: Reader,
    canary: str,
    timeout_s: float | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Json]:
    """Yield the canary each second. The last one has ended, unless the time was over before.

    canary: its id. timeout_s: None: without an end. One that has ended is seen with 0 too.
    """
    deadline = None if timeout_s is None else clock() + timeout_s
    while True:
        found = client.get("/canaries", canary)
        yield found
        if has_ended(found):
            return
        left = math.inf if deadline is None else deadline - clock()
        if left <= 0:
            return
        sleep(min(EVERY_S, left))


def has_ended(canary: Json) -> bool:
    return canary.get("state") in EXITS


class Changes:
    """Decides which looks are told: those that differ from the last one that was, and one in
    QUIET_S. A reason whose numbers alone have moved ("12 of 50 exchanges") is no change: it would
    be told each second."""

    def __init__(self) -> None:
        self._told: tuple[Any, ...] | None = None
        self._at = 0.0

    def is_told(self, canary: Json, now: float) -> bool:
        """now: seconds of any clock that only moves forward."""
        seen = (
            *(canary.get(name) for name in ("state", "paused", "step", "weight_bp")),
            _NUMBER.sub("0", str(canary.get("reason") or "")),
        )
        if seen == self._told and now - self._at < QUIET_S:
            return False
        self._told, self._at = seen, now
        return True


def progress_line(canary: Json, at: float) -> str:
    """Say where a canary is. at: Unix seconds. Pure."""
    parts = [str(canary.get("state", "-")) + (" (paused)" if canary.get("paused") else "")]
    steps, step, weight_bp = (canary.get(name) for name in ("steps", "step", "weight_bp"))
    if canary.get("state") == "ramping" and isinstance(step, int) and isinstance(steps, list):
        parts.append(f"step {step + 1} of {len(steps)}")
    if isinstance(weight_bp, int) and not has_ended(canary):
        parts.append(f"{weight_bp / 100:g}% of the sessions")
    why = f": {canary['reason']}" if canary.get("reason") else ""
    name = version_of(str(canary.get("candidate", "-")))
    return f"{iso(int(at))}  {name}  {', '.join(parts)}{why}"


@contextmanager
def interrupt_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in the body, and print nothing by itself."""
    # Only the main thread may set a handler; Python delivers the signal to no other thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
