"""Make the watch of a run, and tell how the run ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType

from sqlalchemy.orm import Session

from learner.errors import NothingToLearnError, RunStoppedError
from learner.progress.export import exported_run
from learner.progress.facts import facts_of
from learner.progress.store import StoredRun, how_ended
from learner.progress.watch import Keeper, RunWatch
from learner.records import End, Parent, Watch
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database


class Observed:
    """A run and those who are told of it: a context, behind which the run's end is in the store."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        clock: Callable[[], float],
        show: Callable[[str], None],
    ) -> None:
        """clock: Unix seconds. show: prints a line for a person."""
        self.adapter = ""
        """The version that the run made."""
        self.left = False
        """True: the run left its work to the next start (`learner.runs.interrupted`)."""
        self._settings = settings
        self._database = database
        self._clock = clock
        self._show = show
        self._watch: RunWatch | None = None
        self._run_id = ""
        self._holds: Callable[[Session], bool] = lambda session: True

    def watch(self, run_id: str, parent: Parent, holds: Callable[[Session], bool]) -> Watch:
        """Return a watch that keeps what a run tells where the settings say; it is loading now.

        holds: as `StoredRun` has it.
        """
        self._run_id, self._holds = run_id, holds
        keepers: list[Keeper] = [StoredRun(self._database, run_id, clock=self._clock, holds=holds)]
        exported = exported_run(
            self._settings.learner.export,
            run_id,
            facts=lambda: facts_of(self._settings, parent),
            how_ended=partial(how_ended, self._database),
        )
        if exported is not None:
            keepers.append(exported)
        self._watch = RunWatch(keepers, show=self._show)
        self._watch.phase("loading")
        return self._watch

    def __enter__(self) -> Observed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.end(self._how(error), self.adapter)

    def _how(self, error: BaseException | None) -> End | None:
        if error is None or isinstance(error, NothingToLearnError):
            return "ok"
        recorded = how_ended(self._database, self._run_id)
        if recorded is not None:
            return recorded
        if isinstance(error, RunStoppedError) and not self._is_ours():
            return None
        return "killed" if self.left or not isinstance(error, Exception) else "failed"

    def _is_ours(self) -> bool:
        """Return False when another process goes on with the run."""
        try:
            with self._database.write(alone=False) as session:  # `holds` locks the row
                return self._holds(session)
        except StoreError:  # then no other process could take it over either
            return True
