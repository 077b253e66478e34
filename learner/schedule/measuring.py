"""Tell ingest how long an input can be trained on, beside the schedule of a learner that starts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import structlog

from learner.command import learner_command
from sidecar.processes.children import own_environment

log = structlog.get_logger()

MEASURE_S = 300.0
"""torch takes seconds to load, and minutes on a machine that is busy."""


@contextmanager
def measuring(config: Path | None) -> Iterator[None]:
    """Run `python -m learner --measure` in a process of its own: the schedule loads no torch and
    does not wait. The process ends with the block at the latest.

    A measurement that fails costs nothing but itself (logged): each run measures again.
    """
    command = learner_command(config, "--measure")
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=own_environment(os.environ))
    stopped = False

    def watch() -> None:
        try:
            code: int | None = child.wait(MEASURE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            code = None
        # TERM: whoever stops this process may stop its group.
        if code not in (0, -signal.SIGTERM) and not stopped:
            log.warning("pack_tokens_not_measured", exit_code=code)

    watcher = Thread(target=watch, name="pack-tokens")
    watcher.start()
    try:
        yield
    finally:
        stopped = True
        child.kill()  # it is in one of two states: nothing written, or one committed transaction
        child.wait()
        watcher.join()
