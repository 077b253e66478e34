"""One run over several processes: what the first one and the others do.

The first has the store; what it does is `learner.once`. The others get their work from it, compute,
and end. Under a launcher such as torchrun, which takes every exit code but 0 for a failure of the
job, a run that had nothing to do ends with 0.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from learner.distributed.place import Place
from learner.explain import explain
from learner.once import (
    FAILED,
    HELD,
    NO_ROOM,
    NOTHING_TO_LEARN,
    TRAINED,
    prepare_torch,
    torch_trainer,
)
from learner.runs.train import Trainer
from sidecar.settings import Learner, Settings, Telemetry

NewTrainer = Callable[[], Trainer]


def lead(
    settings: Learner,
    config: Path | None,
    place: Place | None,
    run: Callable[[NewTrainer | None], int],
) -> int:
    """Do a run as its first process, or as its only one.

    run: does it with a trainer of this kind; None: in this process alone. Returns: the exit code.
    """
    if place is None:
        return run(partial(trainer_of, settings, config) if settings.processes > 1 else None)
    asked = False

    def joining() -> Trainer:
        nonlocal asked
        asked = True
        return _joining(settings, place)

    code = run(joining)
    if not asked:
        from learner.distributed.trainer import dismiss, joined

        dismiss(lambda: joined(place, settings))
    return 0 if code in (NOTHING_TO_LEARN, HELD, NO_ROOM) else code


def follow(settings: Learner, place: Place) -> int:
    """Do the work of another process than the first. Returns: the exit code."""
    prepare_torch()
    structlog.contextvars.bind_contextvars(rank=place.rank)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it may wait inside of an exchange
    from learner.distributed.trainer import joined, work

    try:
        work(lambda: joined(place, settings), place)
    except Exception as error:  # noqa: BLE001  the first process records it; this is the exit
        why = explain(error, adapters_dir=settings.adapters_dir)
        sys.stderr.write(f"learner, process {place.rank}: {why}\n")
        return FAILED
    return TRAINED


def telemetry_of(telemetry: Telemetry, place: Place | None) -> Telemetry:
    """Return how a process of a run logs: others than the first say no more than what is wrong.

    They compute the same, so each event would be there once for each process. With `debug` they
    say all, with their `rank`.
    """
    if place is None or place.rank == 0 or telemetry.log_level != "info":
        return telemetry
    return telemetry.model_copy(update={"log_level": "warning"})


def as_launched(settings: Settings, place: Place | None) -> Settings:
    """Return the settings with the number of processes that a launcher started.

    The rounding of the result depends on it, so a run that is resumed, or replayed, has as many.
    """
    if place is None:
        return settings
    learner = settings.learner.model_copy(update={"processes": place.size})
    return settings.model_copy(update={"learner": learner})


def trainer_of(settings: Learner, config: Path | None) -> Trainer:
    """Return the trainer with as many processes, on this machine, as the settings say."""
    if settings.processes == 1:
        return torch_trainer()
    prepare_torch()
    from learner.distributed.trainer import RankedTrainer, started

    place = Place(0, settings.processes, 0, settings.processes)
    return RankedTrainer(lambda: started(settings, config), place)


def _joining(settings: Learner, place: Place) -> Trainer:
    prepare_torch()
    from learner.distributed.trainer import RankedTrainer, joined

    return RankedTrainer(lambda: joined(place, settings), place)
