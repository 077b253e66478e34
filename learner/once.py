"""Runs of the learner in one process or several: their output and exit codes.

Of several processes the first has the store; what it does is `run_once`. The others get their work
from it, compute, and end (`follow`). Under a launcher such as torchrun, which takes every exit code
but 0 for a failure of the job, a run that had nothing to do ends with 0.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TextIO

import structlog

from ingest.grouping.selection import TRAINABLE_FLAG, UNTOLD_TOKENS
from learner.command import (
    FAILED,
    HELD,
    NO_ROOM,
    NO_ROOM_FLAG,
    NOTHING_TO_LEARN,
    RENEW,
    STOPPED,
    TRAINED,
)
from learner.distributed.place import Place
from learner.errors import (
    DeviceError,
    HeldError,
    NoRoomError,
    NothingToLearnError,
    RunInProgressError,
    UnpublishedError,
)
from learner.explain import explain
from learner.origin import CACHE, base_digest, library_versions
from learner.patience import when_unlocked
from learner.records import Candidate
from learner.resume import resumed_words
from learner.runs.interrupted import GOES_ON
from learner.runs.train import Run, Trainer
from sidecar.errors import SettingsError
from sidecar.lines import flag_of
from sidecar.settings import Learner, Settings, Telemetry, load_settings
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.visible import counted

log = structlog.get_logger()

POLL_S = 1.0
TO_DO = (
    "`sidecar learner watch` has the figures (docs/reward-watch.md); "
    "`sidecar learner override --reason ...` lets runs go on"
)


def run_once(
    settings: Settings,
    database: Database,
    *,
    run_id: str,
    clock: Callable[[], float],
    stopping: threading.Event,
    trainer: Callable[[], Trainer] | None = None,
) -> int:
    """Train now, print one line, return the exit code: 0 trained, 1 failed, 3 nothing to learn, 4
    held by the reward watch, 5 no room in memory, 6 asked to stop, and the next start goes on.

    TERM and INT end the run at the next pack; it keeps its groups and its work folder.
    stopping: set when such a signal arrived before this call.
    trainer: made when there is something to learn; None: one process alone.
    """
    settings = when_unlocked(
        partial(with_pack_tokens, settings, database, now=clock()),
        stopping=stopping,
        doing="the longest input",
    )
    run = Run(
        settings,
        database,
        trainer or torch_trainer,
        run_id=run_id,
        clock=clock,
        show=shown(sys.stderr),
    )

    def stop(_signal: int, _frame: FrameType | None) -> None:
        stopping.set()
        run.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if stopping.is_set():
        run.stop()
    try:
        _check_room(settings)
        candidate = start_when_free(run.start, wait=stopping.wait)
    except NoRoomError as error:
        sys.stdout.write(f"no room, nothing was trained: {error}\n")
        with database.write(alone=False) as session:
            set_flag(session, flag_of(NO_ROOM_FLAG, settings.line.name), str(error), now=clock())
        return NO_ROOM
    except NothingToLearnError as error:
        sys.stdout.write(f"nothing to learn: {error}\n")
        return NOTHING_TO_LEARN
    except HeldError as error:
        sys.stdout.write(f"held by the reward watch, nothing was trained: {error}\n{TO_DO}\n")
        return HELD
    except Exception as error:  # noqa: BLE001  the run's row and log hold it; this is the exit
        if run.left == "stopped" and stopping.is_set():
            sys.stdout.write(f"stopped run {run.run_id}: {GOES_ON}\n")
            return STOPPED
        why = explain(error, adapters_dir=settings.learner.adapters_dir)
        then = "" if not run.left or isinstance(error, UnpublishedError) else f"; {GOES_ON}"
        sys.stderr.write(f"learner: {why}{then}\n")
        return FAILED
    how = f", in run {run.run_id}, {resumed_words(run.deaths)}" if run.deaths else ""
    sys.stdout.write(f"{_groups_line(run.counts)}trained {candidate.adapter} ")
    sys.stdout.write(f"from {candidate.parent}{how}\n")
    return TRAINED


def _groups_line(counts: Mapping[str, int]) -> str:
    out = [f"{number} {why}" for why, number in sorted(counts.items()) if why != "used" and number]
    left = f"{', '.join(out)} (`sidecar groups ls`)" if out else "none"
    return f"{counted(counts.get('used', 0), 'group')} used; left out: {left}\n"


def with_pack_tokens(settings: Settings, database: Database, *, now: float) -> Settings:
    """Return the settings with the longest input that the memory holds, where they say `auto`, and
    tell it to ingest, which then draws no group for a longer prompt."""
    if settings.learner.pack_tokens or settings.learner.tinker_url:
        return settings
    from learner.policy.adapter_io import open_device
    from learner.policy.memory import reach

    try:
        device = open_device(settings.learner.device)
        found = reach(
            settings.serving.base_model_path, settings.learner, device, answers=settings.groups.size
        )
    except DeviceError:  # the run's own error; at the learner's start `learner.ready` tells it
        found = None
    used = UNTOLD_TOKENS
    if found is not None and found.safe:
        with database.write(alone=False) as session:
            told = get_flag(session, TRAINABLE_FLAG) or ""
            used = found.told(int(told) if told.isdecimal() else 0)
            set_flag(session, TRAINABLE_FLAG, str(used), now=now)
    log.info("pack_tokens_found", holds=found.holds if found is not None else None, used=used)
    learner = settings.learner.model_copy(update={"pack_tokens": used})
    return settings.model_copy(update={"learner": learner})


def start_when_free(start: Callable[[], Candidate], *, wait: Callable[[float], bool]) -> Candidate:
    """Start a run; while another holds the lease, wait: a killed run keeps it for a while, and a
    new heartbeat shows a live one.

    wait: sleeps this many seconds; returns True when it was woken to stop.
    Raises: RunInProgressError, and what `start` raises.
    """
    seen: tuple[str, float] | None = None
    while True:
        try:
            return start()
        except RunInProgressError as error:
            holder = (error.run_id, error.heartbeat_at)
            if seen not in (None, holder):
                raise
            seen = holder
            if wait(POLL_S):
                raise


def shown(stream: TextIO) -> Callable[[str], None]:
    """Return what tells a person at a terminal where the run is; a file has it from the log."""

    def show(line: str) -> None:
        with suppress(OSError):  # a terminal that was closed costs no run
            stream.write(f"{line}\n")
            stream.flush()

    return show if stream.isatty() else lambda line: None


def _check_room(settings: Settings) -> None:
    """Raises: NoRoomError. A device that cannot be opened is the run's own error."""
    if settings.learner.tinker_url:
        return
    from learner.policy.adapter_io import open_device
    from learner.policy.memory import check_room

    try:
        device = open_device(settings.learner.device)
    except DeviceError:
        return
    check_room(settings.serving.base_model_path, settings.learner, device)


def torch_trainer() -> Trainer:
    from learner.grpo.trainer import GrpoTrainer  # here, because torch takes seconds to load

    return GrpoTrainer()


# The runs of a schedule, one after the other, in a process that keeps torch and the base.


def end_without_run(*_: object) -> None:
    """End this process at a signal, before a run. An exception would be raised anywhere: in an
    import, or in a destructor that only prints it."""
    os._exit(STOPPED)


def serve(
    schedule: Connection,
    settings: Settings,
    config: Path | None,
    run: Callable[..., int],
    *,
    stopping: threading.Event,
) -> int:
    """Do the runs of all lines that `learner.schedule.loop.Worker` asks for.

    schedule: a run's id and project come in; its exit code goes out, if the process goes on. It
    ends with that code after a run that failed, was stopped or found no room, and where a fresh
    process is safer; with RENEW before a run that would not begin as it did.
    settings: as `config` has them. stopping: set at a signal in a run. Raises: SettingsError.
    """
    from learner.policy.kept import KEPT  # torch takes seconds to load

    def present(found: Settings) -> tuple[object, ...]:
        base = base_digest(found.serving.base_model_path, found.state_dir / CACHE)
        return found, base, library_versions()

    KEPT.keeps, began = True, present(settings)
    while True:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_without_run)  # until a run sets its own
        if stopping.is_set():
            return STOPPED
        try:
            run_id, project = schedule.recv()
        except EOFError:
            return STOPPED
        now = load_settings(config)
        if present(now) != began:
            log.info("worker_renewed", why="settings, base or libraries are not as they were")
            return RENEW
        trainer = partial(trainer_of, now.learner, config)
        code = run(now.of_line(now.line_named(project)), run_id=run_id, trainer=trainer)
        if code not in (TRAINED, NOTHING_TO_LEARN, HELD) or now.learner.processes > 1:
            return code
        if why := KEPT.rest():
            log.warning("worker_given_up", why=why)
            return code
        with suppress(OSError):  # as in `shown`; and a schedule that is gone asks no more
            schedule.send(code)
            sys.stdout.flush()


# One run over several processes: what the first one and the others do.


def lead(
    settings: Learner,
    config: Path | None,
    place: Place | None,
    run: Callable[[Callable[[], Trainer]], int],
) -> int:
    """Do a run as its first process, or as its only one. Returns: the exit code."""
    if place is None:
        return run(partial(trainer_of, settings, config))
    from learner.distributed.trainer import RankedTrainer, joined

    trainer = RankedTrainer(partial(joined, place, settings))
    code = run(lambda: trainer)
    trainer.dismiss()
    return 0 if code in (NOTHING_TO_LEARN, HELD, NO_ROOM) else code


def follow(settings: Learner, place: Place, stopping: threading.Event) -> int:
    """Do the work of another process than the first. Returns: the exit code."""
    structlog.contextvars.bind_contextvars(rank=place.rank)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it may wait inside of an exchange
    if stopping.is_set():  # before this call: the first process may be gone
        return STOPPED
    from learner.distributed.trainer import joined, work

    try:
        work(partial(joined, place, settings))
    except Exception as error:  # noqa: BLE001  the first process records it; this is the exit
        why = explain(error, adapters_dir=settings.adapters_dir)
        sys.stderr.write(f"learner, process {place.rank}: {why}\n")
        return FAILED
    return TRAINED


def telemetry_of(telemetry: Telemetry, place: Place | None) -> Telemetry:
    """Return how a process of a run logs: others than the first, which compute the same, say no
    more than what is wrong, but with `debug`."""
    if place is None or place.rank == 0 or telemetry.log_level != "info":
        return telemetry
    return telemetry.model_copy(update={"log_level": "warning"})


def as_launched(settings: Settings, place: Place | None) -> Settings:
    """Return the settings with the number of processes that a launcher started: the rounding of
    the result depends on it, so a run that is resumed, or replayed, has as many."""
    if place is None:
        return settings
    if settings.learner.tinker_url:
        raise SettingsError("learner.tinker_url is set: start one process, without a launcher")
    learner = settings.learner.model_copy(update={"processes": place.size})
    return settings.model_copy(update={"learner": learner})


def trainer_of(settings: Learner, config: Path | None) -> Trainer:
    """Return the trainer that the settings name."""
    if settings.tinker_url:
        from learner.tinker import TinkerTrainer

        return TinkerTrainer()
    if settings.processes == 1:
        return torch_trainer()
    from learner.distributed.trainer import RankedTrainer, started

    return RankedTrainer(partial(started, settings, config))
