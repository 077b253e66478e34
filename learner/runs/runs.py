"""Training runs in the store: one at a time per model, by a lease that a heartbeat keeps.

The lines of adapters of a model share its device, so a living run of another line counts too.

Functions work in the caller's write transaction unless they take the database. A run is dead when
its process is gone or gave the lease back, or when it had no heartbeat for `LEASE_S`: a process
that stands still loses its run. The next start takes a dead run over and goes on with it, if it
left a work folder; else it ends the run and gives the groups back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import structlog
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from learner.adapter_folder import folder_digest
from learner.errors import AlteredParentError, ParentError, RunInProgressError, RunStoppedError
from learner.grpo.chance import MOST_RUNS
from learner.records import Fault, Parent
from learner.resume import CLAIMED, Death, Holder, WorkFolder, how_released, is_gone, why_not_again
from learner.runs.source import ATTEMPTS, as_parent, blame, blame_for_death, give_back
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
KEPT_S = 7 * 86_400.0
"""A killed run of another model waits this long to be resumed; after that its files are removed."""

EndStatus = Literal["finished", "failed", "skipped"]


def find_parent(session: Session, model: str) -> Parent:
    """Return the champion of a line, which a run continues; the base when there is none.

    Raises: ParentError when the alias names a version that is not registered.
    """
    alias = session.get(AliasRow, (model, "champion"))
    if alias is None or alias.adapter == BASE:
        return Parent(name=BASE)
    row = session.get(AdapterRow, alias.adapter)
    if row is None:
        raise ParentError(
            f"champion {alias.adapter} is no registered adapter of {model}: its row is gone from "
            "the store; restore the store, or roll back to a version that has one "
            "(`sidecar rollback --to base --reason ...`)"
        )
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


def kept_ids(session: Session, model: str, *, now: float) -> set[str]:
    """Return the ids of runs, of any model, that have not ended. A dead one of another model than
    this is not waited for longer than `KEPT_S`."""
    rows = session.scalars(select(RunRow).where(RunRow.status == RUNNING)).all()
    return {row.run_id for row in rows if row.model == model or now - row.heartbeat_at < KEPT_S}


def last_failed(session: Session, model: str) -> bool:
    """Return True when the newest ended run of this model failed."""
    statement = (
        select(RunRow.status)
        .where(RunRow.model == model, RunRow.ended_at.is_not(None))
        .order_by(RunRow.ended_at.desc(), RunRow.started_at.desc())
        .limit(1)
    )
    return session.scalar(statement) == "failed"


def report_place(
    database: Database, run_id: str, place: str | None, *, token: str | None = None
) -> None:
    """Record the group that a run computes now, in case it is killed meanwhile; skipped while the
    store is locked, or when the run is no longer this process's.

    place: "" for none; None: its trainer has not said yet. token: as `holds`.
    """
    try:
        with database.write(alone=False) as session:
            if holds(session, run_id, token):
                session.execute(update(RunRow).where(RunRow.run_id == run_id).values(place=place))
    except StoreError as error:
        log.warning("place_not_noted", run_id=run_id, place=place, error=str(error))


def take_over(
    session: Session,
    *,
    model: str,
    adapters_dir: Path,
    holder: Holder,
    now: float,
    beside: Collection[str] = (),
) -> RunRow | None:
    """Give the lease of a dead run to this process, and end the dead runs that cannot go on.

    model: name of the line. beside: names of the other lines on this device.
    Returns: the run to go on with; None when there is none.
    Raises: RunInProgressError when a run of this line, or of one beside it, is alive.
    """
    taken: RunRow | None = None
    running = _running(session, model, lock=True)
    others = [row for line in sorted(beside) for row in _running(session, line)]
    for row in (*running, *others):
        if not is_dead(row, now):
            raise RunInProgressError(row.run_id, row.heartbeat_at)
    for row in running:
        folder = WorkFolder(adapters_dir, row.run_id)
        if taken is not None or folder.read(CLAIMED) is None:
            end_dead(session, row, _why_dead(row), now=now)
            continue
        earlier = row.deaths if isinstance(row.deaths, list) else []
        deaths = [one for one in earlier if isinstance(one, dict)]
        deaths.append(asdict(_death(row, folder, now)))
        if (why := why_not_again(deaths)) is not None:
            end_dead(session, row, why, now=now, times=ATTEMPTS)
            continue
        row.deaths, row.holder = deaths, asdict(holder)
        row.heartbeat_at, row.place, row.reason = now, "", None
        taken = row
    return taken


def open_run(
    session: Session,
    *,
    run_id: str,
    model: str,
    parent: str,
    settings: Mapping[str, Any],
    now: float,
    holder: Holder | None = None,
) -> None:
    """Take the lease for a new run, after ending dead runs that held it. Raises:
    RunInProgressError."""
    for row in _running(session, model, lock=True):
        if not is_dead(row, now):
            raise RunInProgressError(row.run_id, row.heartbeat_at)
        end_dead(session, row, _why_dead(row), now=now)
    session.add(
        RunRow(
            run_id=run_id,
            model=model,
            status=RUNNING,
            started_at=now,
            heartbeat_at=now,
            holder=None if holder is None else asdict(holder),
            place="",
            parent=parent,
            settings=dict(settings),
            counts={},
            metrics=[],
        )
    )


def is_dead(row: RunRow, now: float) -> bool:
    """Return True when a run that has not ended does not go on by itself."""
    # A time in the future must not hold the lease for good. A live run loses it and stops.
    return is_gone(row.holder) or not now - LEASE_S < row.heartbeat_at <= now + LEASE_S


def unfinished(session: Session, model: str, now: float) -> str | None:
    """Return the id of a dead run that the next start goes on with, or ends; None without one."""
    dead = (row.run_id for row in _running(session, model) if is_dead(row, now))
    return next(dead, None)


def can_go_on(session: Session, run_id: str, adapters_dir: Path) -> bool:
    """Return True when a run whose process is gone waits to be resumed."""
    row = session.get(RunRow, run_id, with_for_update=True)
    running = row is not None and row.status == RUNNING
    return running and WorkFolder(adapters_dir, run_id).read(CLAIMED) is not None


def taken_from(session: Session, run_id: str, token: str) -> bool:
    """Return True when another process goes on with the run of this one."""
    row = session.get(RunRow, run_id)
    return row is not None and row.status == RUNNING and not _mine(row, token)


def holds(session: Session, run_id: str, token: str | None) -> bool:
    """Return True when a run goes on, in the process of this token, until the transaction ends.

    token: None: it is not compared.
    """
    row = session.get(RunRow, run_id, with_for_update=True)
    return row is not None and row.status == RUNNING and _mine(row, token)


def end_dead(session: Session, row: RunRow, reason: str, *, now: float, times: int = 1) -> None:
    """End a dead run; its death counts against the group that it computed.

    times: how often, where that is a single group.
    """
    culprits = blame_for_death(session, row.run_id, reason)
    abandon(session, row.run_id, reason, now=now, culprits=culprits, times=times)


def _running(session: Session, model: str, *, lock: bool = False) -> Sequence[RunRow]:
    statement = (
        select(RunRow)
        .where(RunRow.model == model, RunRow.status == RUNNING)
        .order_by(RunRow.started_at)
    )
    return session.scalars(statement.with_for_update() if lock else statement).all()


def _why_dead(row: RunRow) -> str:
    return "its process is gone" if is_gone(row.holder) else "it died: its heartbeat stood still"


def _death(row: RunRow, folder: WorkFolder, now: float) -> Death:
    newest, state = folder.newest(), folder.state()
    step, steps = state.get("step"), state.get("steps")
    return Death(
        at=now,
        checkpoint=0 if newest is None else int(newest.name),
        step=step if isinstance(step, int) else 0,
        steps=steps if isinstance(steps, int) else 0,
        place=row.place,
        stopped=how_released(row.holder) == "stopped",
    )


def _mine(row: RunRow, token: str | None) -> bool:
    return token is None or (row.holder or {}).get("token") == token


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
    signal: float | None = None,
    token: str | None = None,
) -> None:
    """Move a run from `running` to its final status. Groups that it still has are given back.

    signal: z of its sessions (`learner.grpo.chance`). token: of the process that ran it.
    Raises: RunStoppedError when the run is no longer running, or another process goes on with it.
    """
    row = session.get(RunRow, run_id, with_for_update=True)
    if row is None or row.status != RUNNING or not _mine(row, token):
        raise RunStoppedError(f"run {run_id} lost its lease; what it learned is not registered")
    row.status = status
    row.reason = reason
    row.ended_at = now
    row.counts = dict(counts or {})
    row.metrics = metrics or []
    row.adapter = adapter
    row.signal = signal
    give_back(session, run_id)


def earlier_signals(session: Session, model: str) -> tuple[float, ...]:
    """Return z of the newest runs of a line that trained on sessions, the newest first."""
    row = RunRow
    known = row.model == model, row.signal.is_not(None)
    newest = select(row.signal).where(*known).order_by(row.ended_at.desc()).limit(MOST_RUNS)
    return tuple(one for one in session.scalars(newest) if one is not None)


def abandon(
    session: Session,
    run_id: str,
    reason: str,
    *,
    now: float,
    culprits: Mapping[str, Fault] | None = None,
    times: int = 1,
    token: str | None = None,
) -> bool:
    """End a run as failed and give its groups back.

    culprits: group id -> fault, for groups that may be the cause; the failure counts against each,
        and one that failed too often is dropped. times: how often it counts against a single one.
    token: of the process that ran it; None: of a dead one.
    Returns: False when it has ended already, or another process goes on with it.
    """
    row = session.get(RunRow, run_id, with_for_update=True)
    if row is None or row.status != RUNNING or not _mine(row, token):
        return False
    row.status, row.reason, row.ended_at = "failed", reason, now
    blame(session, run_id, culprits or {}, times=times)
    returned = give_back(session, run_id)
    log.warning("run_abandoned", run_id=run_id, reason=reason, groups_returned=returned)
    return True


class Heartbeat:
    """Renews a run's lease from a separate thread, however long a step takes.

    `lost` is set when the run is no longer running, or another process goes on with it. A locked
    store only skips a heartbeat.
    """

    def __init__(
        self,
        database: Database,
        run_id: str,
        *,
        clock: Callable[[], float],
        period_s: float,
        token: str | None = None,
    ) -> None:
        self.lost = threading.Event()
        self._token = token
        self._database = database
        self._run_id = run_id
        self._clock = clock
        self._period_s = period_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._period_s):
            try:
                with self._database.write(alone=False) as session:
                    if not holds(session, self._run_id, self._token):
                        self.lost.set()
                        return
                    session.get_one(RunRow, self._run_id).heartbeat_at = self._clock()
            except StoreError as error:
                log.warning("heartbeat_missed", run_id=self._run_id, error=str(error))
