"""A run's progress and steps in the store.

A process that lost its run to another, or to its end, writes nothing more of it. A locked store
costs a report of the progress. A step that could not be written is written with the
next one. Values that are no number (NaN, infinity) are stored as null, because a JSON column of
PostgreSQL takes no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import structlog
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from learner.progress.estimate import Progress
from learner.records import End, StepMetrics
from sidecar.errors import StoreError
from sidecar.store.database import Database
from sidecar.store.models import RunRow, RunStepRow

log = structlog.get_logger()


class StoredRun:
    """Implements `learner.progress.watch.Keeper` over the store."""

    def __init__(
        self,
        database: Database,
        run_id: str,
        *,
        clock: Callable[[], float],
        holds: Callable[[Session], bool] = lambda session: True,
    ) -> None:
        """clock: Unix seconds. holds: asked in the transaction of each write, whether the run is
        still this process's."""
        self._database = database
        self._run_id = run_id
        self._clock = clock
        self._holds = holds
        self._lost = False
        self._unwritten: list[RunStepRow] = []
        self._missing: list[RunStepRow] = []
        """Steps that may be in the store already, and then keep the time that they have."""
        self._stale_after: int | None = None
        """Steps with a higher number, of an attempt that was given up, are still in the store."""

    def keep_progress(self, found: Progress) -> None:
        values = {"progress": {**asdict(found), "at": self._clock()}}
        self._write(
            "progress",
            lambda session: session.execute(
                update(RunRow).where(RunRow.run_id == self._run_id).values(values)
            ),
        )

    def drop_steps(self) -> None:
        self.go_on(())

    def go_on(self, steps: Sequence[StepMetrics]) -> None:
        self._unwritten, self._missing = [], [self._row(one) for one in steps]
        self._stale_after = len(steps)
        self._write("steps", self._flush)

    def keep_step(self, metrics: StepMetrics) -> None:
        self._unwritten.append(self._row(metrics))
        self._write("steps", self._flush)

    def end(self, how: End | None, adapter: str) -> None:
        """The run's row has its end already."""

    def _row(self, metrics: StepMetrics) -> RunStepRow:
        body = {key: _number(value) for key, value in asdict(metrics).items()}
        return RunStepRow(run_id=self._run_id, step=metrics.step, at=self._clock(), body=body)

    def _flush(self, session: Session) -> None:
        of_run = RunStepRow.run_id == self._run_id
        if self._stale_after is not None:
            session.execute(delete(RunStepRow).where(of_run, RunStepRow.step > self._stale_after))
        if self._missing:
            present = set(session.scalars(select(RunStepRow.step).where(of_run)))
            for row in self._missing:
                if row.step not in present:
                    session.merge(row)
        for row in self._unwritten:
            session.merge(row)

    def _write(self, what: str, change: Callable[[Session], object]) -> None:
        if self._lost:
            return
        try:
            with self._database.write(alone=False) as session:
                if not self._holds(session):
                    self._lost = True
                    why = "the run has ended, or another process goes on with it"
                    log.warning("progress_not_kept", run_id=self._run_id, what=what, error=why)
                    return
                change(session)
        except StoreError as error:
            log.warning("progress_not_kept", run_id=self._run_id, what=what, error=str(error))
            return
        if what == "steps":
            self._unwritten, self._missing, self._stale_after = [], [], None


def _number(value: Any) -> Any:  # Any: a field of StepMetrics
    return None if isinstance(value, float) and not math.isfinite(value) else value


def how_ended(database: Database, run_id: str) -> End | None:
    """Return how a run ended; None: it did not, or the store cannot say so now, or not at all."""
    try:
        with database.read() as session:
            status = session.scalar(select(RunRow.status).where(RunRow.run_id == run_id))
    except StoreError:  # asked again when the next run begins
        return None
    return ENDS.get(status or "")


ENDS: dict[str, End] = {"finished": "ok", "skipped": "ok", "failed": "failed"}
"""`training_run.status` -> the end."""
