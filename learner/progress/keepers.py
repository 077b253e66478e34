"""Make the watch of a run."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.orm import Session

from learner.progress.export import exported_run
from learner.progress.store import StoredRun
from learner.progress.watch import Keeper, RunWatch
from learner.records import Watch
from sidecar.settings import Settings
from sidecar.store.database import Database


def observe(
    settings: Settings,
    database: Database,
    run_id: str,
    clock: Callable[[], float],
    show: Callable[[str], None],
    holds: Callable[[Session], bool],
) -> Watch:
    """Return a watch that keeps what a run tells where the settings say; the run is loading now.

    clock: Unix seconds. show: prints a line for a person. holds: as `StoredRun` has it.
    """
    keepers: list[Keeper] = [StoredRun(database, run_id, clock=clock, holds=holds)]
    if (exported := exported_run(settings.learner.export, run_id)) is not None:
        keepers.append(exported)
    watch = RunWatch(keepers, show=show)
    watch.phase("loading")
    return watch
