"""`python -m learner`: the schedule, or with `--once` one run now, or with `--worker` those of the
schedule."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import uuid
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from sidecar.processes import one_line_at_interrupt


def main(argv: list[str] | None = None) -> int:
    """Run the learner. Returns: 0 after a stop by signal or a run that trained; 1 when it cannot
    start; 2 for bad use; with `--once` also what `run_once` returns."""
    with one_line_at_interrupt("sidecar learn"):
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
    what.add_argument(
        "--worker",
        action="store_true",
        help="the runs that the schedule asks for; standard input is its socket",
    )
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
        follow,
        lead,
        run_once,
        shown,
        telemetry_of,
        trainer_of,
        with_pack_tokens,
    )
    from learner.patience import when_unlocked
    from learner.progress.watch import note_missing
    from learner.ready import why_no_packages, why_not_ready
    from learner.replay import replay
    from learner.resident import serve
    from learner.schedule.loop import measuring, run_schedule
    from sidecar.errors import SettingsError, StateLockError, StoreError
    from sidecar.logs import configure_logging
    from sidecar.processes import only_one
    from sidecar.settings import load_settings, open_keyring
    from sidecar.store.database import Database
    from sidecar.tracing.telemetry import configure_tracing

    os.nice(args.nice)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        settings = load_settings(args.config)
        settings = settings.of_line(settings.line_named(args.project))
        trains = args.once or args.worker or args.measure or args.replay is not None
        lacks = why_no_packages(scheduled=not trains)
        # Where another machine learns, the schedule only waits, and a run asked of it says this.
        if lacks and (trains or settings.learner.schedule != "manual"):
            sys.stderr.write(f"learner: {lacks}\n")
            return 1
        place = given_place(os.environ) if args.once else None
        configure_logging(telemetry_of(settings.telemetry, place), "learn")
        settings = as_launched(settings, place)
        if place is not None and place.rank > 0:
            return follow(settings.learner, place)
        tracing = configure_tracing(settings.telemetry, "learn")
        database = Database(settings.store.url, open_keyring(settings.store))
        try:
            when_unlocked(database.upgrade, stopping=stopping, doing="the start")
            if args.measure:
                if settings.learner.schedule != "manual":
                    note_missing(list(why_not_ready(settings)), database, now=time.time())
                with_pack_tokens(settings, database, now=time.time())
                return 0
            if args.replay is not None:
                trainer = partial(trainer_of, config=args.config)
                show = shown(sys.stderr)
                return replay(settings, database, args.replay, trainer=trainer, show=show)
            if args.worker:
                return serve(settings, database, args.config, stopping=stopping)
            if args.once:
                return lead(
                    settings.learner,
                    args.config,
                    place,
                    lambda trainer: run_once(
                        settings,
                        database,
                        run_id=uuid.uuid4().hex,
                        clock=time.time,
                        stopping=stopping,
                        trainer=trainer,
                    ),
                )
            by_hand = settings.learner.schedule == "manual"
            told = bool(settings.learner.pack_tokens) and by_hand
            measured = nullcontext() if told or lacks else measuring(args.config)
            with only_one(settings.state_dir, "learn"):
                forget = partial(note_missing, (), database, now=time.time())
                when_unlocked(forget, stopping=stopping, doing="the start")
                with measured:
                    return run_schedule(
                        settings, database, args.config, clock=time.time, stopping=stopping
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
