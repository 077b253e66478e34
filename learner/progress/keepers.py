"""Make the watch of a run."""

from __future__ import annotations

from collections.abc import Callable

from learner.progress.export import exported_run
from learner.progress.watch import Keeper, RunWatch
from learner.records import Watch
from sidecar.settings import Settings


def observe(
    settings: Settings,
    stored: Keeper,
    run_id: str,
    show: Callable[[str], None],
) -> Watch:
    """Return a watch that keeps what a run tells where the settings say; the run is loading now.

    stored: keeps it in the store. show: prints a line for a person.
    """
    keepers: list[Keeper] = [stored]
    if (exported := exported_run(settings.learner.export, run_id)) is not None:
        keepers.append(exported)
    watch = RunWatch(keepers, show=show)
    watch.phase("loading")
    return watch
