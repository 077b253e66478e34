"""A run that ends before its time and leaves what it has done to the next start.

Three ways lead there. It was asked to stop (TERM: a deployment, a machine that is drained): nothing
is at fault, and it counts towards no limit. Or another of its processes is gone: to the run that is
what SIGKILL is to a run of one process, so it counts as a death (`learner.resume`).
Or it is trained, and the store could not be written for ten minutes or failed as it published, or
the disk is full behind a step that is kept: that is no fault of it either.

The row stays `running`, its holder gives the lease back, and the groups stay claimed. What such
runs have on disk is removed once they will not go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.reward_watch.store import Answer, ask
from learner.errors import (
    FullDiskError,
    HeldError,
    RankFailedError,
    RankLostError,
    RunStoppedError,
    UnpublishedError,
)
from learner.explain import explain_full, is_full, one_line
from learner.resume import CLAIMED, Released, WorkFolder, released, remove_folder, work_folders
from learner.runs.publish import unplace
from learner.runs.runs import KEPT_S, holds, kept_ids, taken_from
from sidecar.errors import StoreError
from sidecar.lines import learner_of
from sidecar.settings import Settings
from sidecar.store.database import Database, count
from sidecar.store.models import AuditRow, RunRow

log = structlog.get_logger()

GOES_ON = "the next start goes on with it"


@contextmanager
def keeping_steps(work: WorkFolder) -> Iterator[None]:
    """Leave a run whose disk is full to the next start, if it has a checkpoint to go on from.

    Raises: FullDiskError; what is half written is removed, so that others have its space.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error) or work.newest() is None:
            raise
        remove_folder(work.adapter)
        text = explain_full(error, adapters_dir=work.path.parent)
        raise FullDiskError(text) from error


def leave(
    database: Database, work: WorkFolder, error: BaseException, *, asked: bool, token: str
) -> Released | None:
    """Give the lease of a run back, so that the next start goes on with it.

    asked: it was asked to stop. token: of this process.
    Returns: None when the run cannot go on, or is not this process's: it is to end as failed.
    """
    # A launcher asks all processes of a run, and the others end first.
    ended = asked and isinstance(error, RunStoppedError | RankLostError | RankFailedError)
    stopped = ended or isinstance(error, UnpublishedError | FullDiskError)
    if not (stopped or isinstance(error, RankLostError)) or work.read(CLAIMED) is None:
        return None
    how: Released = "stopped" if stopped else "broken"
    faults = error.faults if isinstance(error, RankLostError) else {}
    said = one_line(error)
    if not isinstance(error, FullDiskError):
        said = f"{type(error).__name__}: {said}"
    why = "asked to stop" if how == "stopped" and asked else said
    try:
        with database.write() as session:
            if not holds(session, work.run_id, token):
                return None
            row = session.get_one(RunRow, work.run_id)
            row.place = next(iter(faults), "") if how == "broken" else ""
            row.holder, row.reason = released(row.holder, how), f"{why}; {GOES_ON}"
    except StoreError as store_error:
        # Its process ends now, so the next start finds the run as after SIGKILL.
        log.warning("lease_not_given_back", run_id=work.run_id, error=str(store_error))
        return how
    log.warning("run_left", run_id=work.run_id, why=why)
    return how


def begin_again(
    database: Database, run_id: str, deaths: list[dict[str, Any]], *, token: str
) -> None:
    """Record that a resumed run starts from its first step: its checkpoint was of no use.

    deaths: as its row has them; the last one's step becomes 0.
    """
    if not deaths:
        return
    deaths[-1] = {**deaths[-1], "step": 0}
    try:
        with database.write() as session:
            if holds(session, run_id, token):
                session.get_one(RunRow, run_id).deaths = list(deaths)
    except StoreError as error:
        # The lineage has it right; only the row still names the step.
        log.warning("restart_not_recorded", run_id=run_id, error=str(error))


def sweep(database: Database, adapters_dir: Path, model: str, *, now: float) -> None:
    """Remove the work folders of runs that will not go on; what cannot be removed stays (logged).

    A run that this store does not know may be another store's: its folder stays for `KEPT_S`.
    Raises: StoreError.
    """
    found = list(work_folders(adapters_dir))
    with database.read() as session:
        kept = kept_ids(session, model, now=now)
        foreign = {run_id for run_id, _ in found if session.get(RunRow, run_id) is None}
    for run_id, folder in found:
        leftover = WorkFolder(adapters_dir, run_id)
        try:
            young = run_id in foreign and now - folder.stat().st_mtime < KEPT_S
            if run_id not in kept and not young and take_back(database, leftover):
                leftover.remove()
        except OSError as error:
            log.warning("work_folder_kept", folder=str(folder), error=str(error))


def take_back(database: Database, work: WorkFolder, *, token: str | None = None) -> bool:
    """Remove what a run placed and did not register. token: None: its process is dead. Returns:
    False when that is not known, or another process goes on with the run."""
    try:
        with database.write() as session:
            if token is not None and taken_from(session, work.run_id, token):
                return False
            unplace(session, work, work.path.parent)
    except StoreError as error:
        log.warning("work_folder_kept", folder=str(work.path), error=str(error))
        return False
    return True


# Ask the reward watch before a run takes groups, and record that it holds the learner.

HELD = "held"
STAGE = "watch"
"""Counter rows: (stage, "held_" and the check) -> times that a check began to hold the learner."""


def check_hold(database: Database, settings: Settings, run_id: str, *, now: float) -> None:
    """Return when a run may begin. Raises: HeldError when the reward watch holds the learner; the
    run's row says why. StoreError."""
    model = settings.line.name
    with database.read() as session:
        answer = ask(session, model, settings.watch)
    if answer.verdict.findings and not answer.holding:
        log.warning("reward_watch_waived", run_id=run_id, found=answer.verdict.reason)
    if not answer.holding:
        return
    with database.write() as session:
        began = _record(session, settings, run_id, answer, now=now)
    (log.error if began else log.info)(
        "run_held", run_id=run_id, champion=answer.verdict.champion, reason=answer.reason
    )
    raise HeldError(answer.reason)


def _record(
    session: Session, settings: Settings, run_id: str, answer: Answer, *, now: float
) -> bool:
    """Write or renew the row of a held run. Returns: True when the learner was not held so."""
    model = settings.line.name
    newest = select(RunRow).where(RunRow.model == model).order_by(RunRow.started_at.desc())
    row = session.scalars(newest.limit(1)).first()
    findings = [asdict(one) for one in answer.holding]
    if (
        row is not None
        and row.status == HELD
        and row.parent == answer.verdict.champion
        and _checks(row.held) == {one.check for one in answer.holding}
    ):
        times = row.held.get("checks") if row.held else None
        row.held = {"findings": findings, "checks": (times if isinstance(times, int) else 1) + 1}
        row.reason, row.heartbeat_at, row.ended_at = answer.reason, now, now
        return False
    session.add(
        RunRow(
            run_id=run_id,
            model=model,
            status=HELD,
            reason=answer.reason,
            started_at=now,
            heartbeat_at=now,
            ended_at=now,
            parent=answer.verdict.champion,
            settings=settings.watch.model_dump(mode="json"),
            counts={},
            metrics=[],
            held={"findings": findings, "checks": 1},
        )
    )
    session.add(
        AuditRow(
            at=now,
            actor="learner",
            action="learner.held",
            subject=learner_of(model),
            before={},
            after={"run_id": run_id, "checks": sorted({str(one.check) for one in answer.holding})},
            reason=answer.reason,
        )
    )
    for one in answer.holding:
        count(session, STAGE, f"held_{one.check}")
    return True


def _checks(held: Mapping[str, Any] | None) -> set[object]:  # Any: JSON
    """Return the checks of a held run's findings, as far as they can be read."""
    findings = (held or {}).get("findings")
    found = findings if isinstance(findings, list) else []
    return {one.get("check") for one in found if isinstance(one, dict)}
