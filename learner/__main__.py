"""`python -m learner`: the schedule, or with `--once` one run now."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import uuid
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from sidecar.processes import ends_in_one_line


def main(argv: list[str] | None = None) -> int:
    """Run the learner. Returns: 0 after a stop by signal or a run that trained; 1 when it cannot
    start; 2 for bad use; with `--once` also what `run_once` returns."""
    with ends_in_one_line("sidecar learn"):
        return _main(argv)


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(prog="learner", description=__doc__)
    made.add_argument("--config", type=Path, help="TOML file; default ./sidecar.toml")
    what = made.add_mutually_exclusive_group()
    what.add_argument(
        "--once",
        action="store_true",
        help="one run now; exit 3: nothing, 4: held, 5: no room, 6: stopped",
    )
    what.add_argument("--worker", type=int, metavar="FD", help="what a schedule asks for by FD")
    made.add_argument(
        "--measure",
        action="store_true",
        help="log what runs lack here, and tell ingest how long an input can be trained on",
    )
    what.add_argument(
        "--replay", metavar="RUN", help="a run id or a version: train it again, publish nothing"
    )
    made.add_argument(
        "--project", help="train, or replay, the adapters of this project of serving.own_adapters"
    )
    made.add_argument("--nice", type=int, default=0, help="lower this process's priority")
    return made


def _main(argv: list[str] | None) -> int:
    args = parser().parse_args(argv)

    from learner.distributed.place import given_place
    from learner.once import (
        as_launched,
        end_without_run,
        follow,
        lead,
        run_once,
        serve,
        shown,
        telemetry_of,
        trainer_of,
        with_pack_tokens,
    )
    from learner.patience import when_unlocked
    from learner.progress.watch import Missing, note_missing
    from learner.ready import why_no_packages, why_not_ready
    from learner.replay import replay
    from learner.schedule.loop import run_schedule
    from sidecar.errors import SettingsError, StateLockError, StoreError
    from sidecar.logs import configure_logging
    from sidecar.processes import only_one
    from sidecar.settings import load_settings, open_keyring
    from sidecar.store.database import Database
    from sidecar.tracing.telemetry import configure_tracing

    # torch reads this at import. Threads that spin while they wait for each other take CPU time
    # from vLLM, and stall when they are preempted: on two busy cores a step ran 5 times faster with
    # this setting, on idle cores 1.2 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.nice(args.nice)
    stopping = threading.Event()

    for number in (signal.SIGTERM, signal.SIGINT):
        stop = end_without_run if args.worker is not None else lambda *_: stopping.set()
        signal.signal(number, stop)
    try:
        settings = load_settings(args.config)
        settings = settings.of_line(settings.line_named(args.project))
        trains = args.once or args.measure or args.replay is not None or args.worker is not None
        lacks = why_no_packages(scheduled=not trains)
        # Where another machine learns, the schedule only waits, and a run asked of it says this.
        if lacks and (trains or settings.learner.schedule != "manual"):
            sys.stderr.write(f"learner: {lacks}\n")
            if args.worker is not None:  # the run that `sidecar learner run` asked for
                missing = Missing("learner.schedule", lacks)
                with closing(Database(settings.store.url, open_keyring(settings.store))) as store:
                    note_missing([missing], store, now=time.time())
            return 1
        place = given_place(os.environ) if args.once else None
        configure_logging(telemetry_of(settings.telemetry, place), "learn")
        settings = as_launched(settings, place)
        if place is not None and place.rank > 0:
            return follow(settings.learner, place, stopping)
        tracing = configure_tracing(settings.telemetry, "learn")
        database = Database(settings.store.url, open_keyring(settings.store))
        try:
            when_unlocked(database.upgrade, stopping=stopping, doing="the start")
            if args.measure:
                if settings.learner.schedule != "manual":
                    note_missing(list(why_not_ready(settings)), database, now=time.time())
                with_pack_tokens(settings, database, now=time.time())
                if args.worker is None:
                    return 0
            if args.replay is not None:
                trainer = partial(trainer_of, config=args.config)
                show = shown(sys.stderr)
                return replay(settings, database, args.replay, trainer=trainer, show=show)
            run = partial(run_once, database=database, clock=time.time, stopping=stopping)
            if args.worker is not None:
                if settings.learner.schedule == "manual":  # what an earlier run lacked is there now
                    note_missing([], database, now=time.time())
                with Connection(args.worker) as schedule:
                    return serve(schedule, settings, args.config, run, stopping=stopping)
            if args.once:
                once = partial(run, settings, run_id=uuid.uuid4().hex)
                return lead(settings.learner, args.config, place, lambda of: once(trainer=of))
            told = bool(settings.learner.pack_tokens) and settings.learner.schedule == "manual"
            with only_one(settings.state_dir, "learn"):
                forget = partial(note_missing, (), database, now=time.time())
                when_unlocked(forget, stopping=stopping, doing="the start")
                return run_schedule(
                    settings,
                    database,
                    args.config,
                    clock=time.time,
                    stopping=stopping,
                    measure=not told and not lacks,
                )
        finally:
            database.close()
            tracing.shutdown()
    except SettingsError as error:
        sys.stderr.write(f"learner: {error}\n")
        return 2
    except (StoreError, StateLockError) as error:
        sys.stderr.write(f"learner: {error}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
