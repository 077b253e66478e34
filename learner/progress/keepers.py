"""Make the watch of a run."""

from __future__ import annotations

from collections.abc import Callable

from learner.progress.store import StoredRun
from learner.progress.watch import RunWatch
from learner.records import Watch
from sidecar.store.database import Database


def watch_run(
    database: Database, run_id: str, *, clock: Callable[[], float], show: Callable[[str], None]
) -> Watch:
    """Return a watch that keeps what the run tells in the store; the run is loading now.

    clock: Unix seconds. show: prints a line for a person.
    """
    watch = RunWatch([StoredRun(database, run_id, clock=clock)], show=show)
    watch.phase("loading")
    return watch
