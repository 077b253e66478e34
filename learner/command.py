"""The command line of another process of the learner, and what it ends with."""

from __future__ import annotations

import signal
from pathlib import Path

from sidecar.parent_death import guarded_command
from sidecar.processes import own_python

TRAINED, FAILED, NOTHING_TO_LEARN, HELD, NO_ROOM, STOPPED = 0, 1, 3, 4, 5, 6
"""Exit codes of one run (`learner.once`)."""
RENEW = 7
"""Exit code of a worker before a run that is to be asked of a fresh one."""
NO_ROOM_FLAG = "learner_no_room"
"""Flag of the store: why the last run that was refused did not fit. The schedule tells it on."""


def learner_command(config: Path | None, *words: str) -> list[str]:
    """Return `python -m learner WORDS` with these settings; it ends with the process, or the
    thread, that starts it."""
    command = [*guarded_command(), *own_python("learner", *words)]
    return command if config is None else [*command, "--config", str(config)]


def ended_words(code: int) -> str:
    """Say how a process failed. code: its exit code; negative: killed by that signal."""
    if code >= 0:
        return f"failed (exit code {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed ({name})"
