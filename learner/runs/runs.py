"""Training runs in the store: one at a time per model, by a lease that a heartbeat keeps.

Functions work in the caller's write transaction unless they take the database. A run without a
heartbeat for `LEASE_S` is dead: the next run ends it and gives its groups back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import structlog
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from learner.adapter_folder import folder_digest
from learner.errors import (
    AlteredParentError,
    ParentError,
    RunInProgressError,
    RunStoppedError,
)
from learner.records import Fault, Parent
from learner.runs.blame import blame, blame_for_death
from learner.runs.source import as_parent, give_back
from sidecar.errors import StoreError
from sidecar.records import BASE
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AliasRow, RunRow

log = structlog.get_logger()

RUNNING = "running"
HEARTBEAT_S = 3.0
LEASE_S = 30.0
"""Lease of a run: ten missed heartbeats, longer than the store's busy timeout, yet short enough to
wait for."""

EndStatus = Literal["finished", "failed", "skipped"]


def find_parent(session: Session, model: str) -> Parent:
    """Return the champion, which a run continues; the base when there is none.

    Raises: ParentError when the alias names a version that is not registered.
    """
    alias = session.get(AliasRow, (model, "champion"))
    if alias is None or alias.adapter == BASE:
        return Parent(name=BASE)
    row = session.get(AdapterRow, alias.adapter)
    if row is None:
        raise ParentError(f"champion {alias.adapter} is no registered adapter of {model}")
    return as_parent(row)


def check_parent(parent: Parent) -> None:
    """Compare the parent's folder with the registry; no effect for the base, which has no folder.

    Raises: ParentError when the folder cannot be read, AlteredParentError when it was changed.
    """
    if parent.path is None:
        return
    cure = "restore the folder from a backup, or roll back to another version"
    try:
        found = folder_digest(parent.path)
    except OSError as error:
        where = error.filename or parent.path
        raise ParentError(f"parent {parent.name}: {where}: {error.strerror}; {cure}") from error
    if found != parent.digest:
        raise AlteredParentError(
            f"parent {parent.name}: {parent.path} was changed after it was registered (digest "
            f"{found[:12]}, the registry says {(parent.digest or '')[:12]}); {cure}"
        )


def running_ids(session: Session) -> set[str]:
    """Return the ids of runs, of any model, that have not ended."""
    return set(session.scalars(select(RunRow.run_id).where(RunRow.status == RUNNING)))


def last_failed(session: Session, model: str) -> bool:
    """Return True when the newest ended run of this model failed."""
    statement = (
        select(RunRow.status)
        .where(RunRow.model == model, RunRow.ended_at.is_not(None))
        .order_by(RunRow.ended_at.desc(), RunRow.started_at.desc())
        .limit(1)
    )
    return session.scalar(statement) == "failed"


def report_place(database: Database, run_id: str, place: str) -> None:
    """Record the group that a run computes now, in case the run is killed meanwhile.

    While the store is locked the record is skipped, and the run continues.
    """
    try:
        with database.write(alone=False) as session:
            session.execute(update(RunRow).where(RunRow.run_id == run_id).values(place=place))
    except StoreError as error:
        log.warning("place_not_noted", run_id=run_id, place=place, error=str(error))


def open_run(
    session: Session,
    *,
    run_id: str,
    model: str,
    parent: str,
    settings: Mapping[str, Any],
    now: float,
) -> None:
    """Take the lease, after ending dead runs that held it.

    Raises: RunInProgressError when another run of this model is alive.
    """
    running = session.scalars(
        select(RunRow).where(RunRow.model == model, RunRow.status == RUNNING).with_for_update()
    ).all()
    for row in running:
        # A damaged time, or one in the future, must not hold the lease for good. A live run loses
        # it and stops.
        heartbeat_at = row.heartbeat_at if isinstance(row.heartbeat_at, int | float) else 0.0
        if now - LEASE_S < heartbeat_at <= now + LEASE_S:
            raise RunInProgressError(row.run_id, heartbeat_at)
        reason = "it died: its heartbeat stood still"
        culprits = blame_for_death(session, row.run_id, reason)
        abandon(session, row.run_id, reason, now=now, culprits=culprits)
    session.add(
        RunRow(
            run_id=run_id,
            model=model,
            status=RUNNING,
            started_at=now,
            heartbeat_at=now,
            parent=parent,
            settings=dict(settings),
            counts={},
            metrics=[],
        )
    )


def end_run(
    session: Session,
    run_id: str,
    status: EndStatus,
    *,
    now: float,
    reason: str | None = None,
    counts: Mapping[str, int] | None = None,
    metrics: list[dict[str, Any]] | None = None,
    adapter: str | None = None,
) -> None:
    """Move a run from `running` to its final status.

    Raises: RunStoppedError when the run is no longer running: another one ended it.
    """
    row = session.get(RunRow, run_id, with_for_update=True)
    if row is None or row.status != RUNNING:
        raise RunStoppedError(f"run {run_id} lost its lease; what it learned is not registered")
    row.status = status
    row.reason = reason
    row.ended_at = now
    row.counts = dict(counts or {})
    row.metrics = metrics or []
    row.adapter = adapter


def abandon(
    session: Session,
    run_id: str,
    reason: str,
    *,
    now: float,
    culprits: Mapping[str, Fault] | None = None,
) -> bool:
    """End a run as failed and give its groups back. Returns: False when it has ended already.

    culprits: group id -> fault, for groups that may be the cause; the failure counts against each,
        and one that failed too often is dropped.
    """
    row = session.get(RunRow, run_id, with_for_update=True)
    if row is None or row.status != RUNNING:
        return False
    row.status, row.reason, row.ended_at = "failed", reason, now
    blame(session, run_id, culprits or {})
    returned = give_back(session, run_id)
    log.warning("run_abandoned", run_id=run_id, reason=reason, groups_returned=returned)
    return True


class Heartbeat:
    """Renews a run's lease from a separate thread, however long a step takes.

    `lost` is set when the run is no longer running. A locked store only skips a heartbeat.
    """

    def __init__(
        self, database: Database, run_id: str, *, clock: Callable[[], float], period_s: float
    ) -> None:
        self.lost = threading.Event()
        self._database = database
        self._run_id = run_id
        self._clock = clock
        self._period_s = period_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._period_s):
            try:
                with self._database.write(alone=False) as session:
                    row = session.get(RunRow, self._run_id, with_for_update=True)
                    if row is None or row.status != RUNNING:
                        self.lost.set()
                        return
                    row.heartbeat_at = self._clock()
            except StoreError as error:
                log.warning("heartbeat_missed", run_id=self._run_id, error=str(error))
