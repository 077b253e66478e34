"""The command line of another process of the learner."""

from __future__ import annotations

from pathlib import Path

from sidecar.parent_death import guarded_command
from sidecar.processes import own_python


def learner_command(config: Path | None, *words: str) -> list[str]:
    """Return `python -m learner WORDS` with these settings; it ends with the process, or the
    thread, that starts it."""
    command = [*guarded_command(), *own_python("learner", *words)]
    return command if config is None else [*command, "--config", str(config)]
