"""Do the runs that the schedule asks for, one after the other: `python -m learner --worker`.

The import of torch and the load of the base are paid once, for the runs of all lines of adapters.
Standard input is a socket of the schedule's (`learner.schedule.loop.Worker`). A line of JSON asks
for a run, and one byte, its exit code, says that it has ended and that this process waits for the
next. Otherwise the process ends, with the run's exit code: after a run that failed, was stopped or
found no room, and whenever a fresh process is the safer place for the next one. With `RENEW` it
does so before the run, when that would not begin as this process did.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import structlog

from learner.command import HELD, NOTHING_TO_LEARN, RENEW, STOPPED, TRAINED
from learner.once import prepare_torch, run_once, trainer_of
from learner.origin import CACHE, base_digest, library_versions
from learner.runs.train import Trainer
from sidecar.settings import Settings, load_settings
from sidecar.store.database import Database

log = structlog.get_logger()

GOES_ON_AFTER = (TRAINED, NOTHING_TO_LEARN, HELD)
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    settings: Settings, database: Database, config: Path | None, *, stopping: threading.Event
) -> int:
    """Do runs until the schedule closes the socket. settings: as `config` says them now.

    stopping: set at a signal. Returns: the exit code. Raises: SettingsError, when the file is
    broken by now.
    """
    prepare_torch()
    from learner.grpo.trainer import GrpoTrainer
    from learner.policy.kept import KeptBase

    kept, began = KeptBase(), _depends_on(settings)
    with socket.socket(fileno=os.dup(0)) as control, control.makefile("rb") as requests:
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)  # processes that a run starts do not get the socket
        while (asked := _next(requests, stopping)) is not None:
            now = load_settings(config)
            if changed := [name for name, one in _depends_on(now).items() if one != began[name]]:
                log.info("worker_renewed", changed=changed)
                return RENEW
            several = now.learner.processes > 1
            trainer: Callable[[], Trainer] = partial(GrpoTrainer, kept)
            code = run_once(
                now.of_line(now.line_named(asked["project"])),
                database,
                run_id=asked["run_id"],
                clock=time.time,
                stopping=stopping,
                trainer=partial(trainer_of, now.learner, config) if several else trainer,
                held=kept.held,
            )
            with suppress(OSError):  # as in `shown`
                sys.stdout.flush()
            if code not in GOES_ON_AFTER or several:
                return code
            if why := kept.rest():
                log.warning("worker_given_up", why=why)
                return code
            try:
                control.send(bytes([code]))
            except OSError:  # the schedule is gone, so nobody asks for another
                return code
    return STOPPED


def _depends_on(settings: Settings) -> dict[str, Any]:
    """Return what a process keeps of its beginning: it is to be the same for each of its runs."""
    base = base_digest(settings.serving.base_model_path, settings.state_dir / CACHE)
    found = {"settings": settings, "libraries": library_versions()}
    return {**found, "base": None if base is None else base.digest}


def _next(requests: BinaryIO, stopping: threading.Event) -> dict[str, Any] | None:
    """Wait for the next run. Returns: None when there is none: the socket or the process is to
    close. Raises: SystemExit at a signal; there is nothing to leave to the next start."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, end)
    if stopping.is_set():
        return None
    asked = requests.readline()
    for number in SIGNALS:
        signal.signal(number, lambda *_: stopping.set())
    return json.loads(asked) if asked else None
