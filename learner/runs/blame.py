"""Decide which groups a failed run counts against, and drop groups that failed too often.

If the trainer names the failing group, or was killed while it computed one, that group is blamed,
and dropped at the second failure. A killed run is resumed first (`learner.resume.rule`): it blames
nobody before it died in one place three times, or cannot go on. Otherwise every group of the run is
suspected, or only those that were suspected before. Later runs take half of the suspects at a time
(`learner.runs.retry`), until a single group is blamed. Groups that do not fit into memory are
blamed together when they are most of a run, because another process may use the memory. Faults of
the environment (disk, device, store, base, parent, memory for the base) count against no group.

Functions work in the caller's write transaction.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ingest.store.groups import CLAIMED
from learner.errors import (
    DeviceError,
    FaultyGroupsError,
    IncompleteAdapterError,
    RunStoppedError,
)
from learner.records import Fault
from learner.runs.source import DETAIL_LENGTH, drop
from sidecar.store.models import GroupRow, RunRow

FAILED_RUNS = "failed_runs"
ATTEMPTS = 2
"""Failures after which a group that was blamed alone is dropped."""
ATTEMPTS_TOGETHER = 10
"""Failures after which a group that was blamed with others is dropped. Halving 64 suspects down to
one takes seven runs."""
ENVIRONMENT = (OSError, MemoryError, DeviceError, IncompleteAdapterError, RunStoppedError)
"""Errors that no group causes, unless they name some; StoreError and ParentError are among them."""


def blame_for_error(session: Session, run_id: str, error: BaseException) -> Mapping[str, Fault]:
    """Return the groups of a run that may have caused its error, with their faults."""
    if isinstance(error, FaultyGroupsError) and error.faults:
        return error.faults
    if isinstance(error, ENVIRONMENT) or not isinstance(error, Exception):
        return {}
    return _suspects(session, run_id, f"{type(error).__name__}: {error}")


def blame_for_death(session: Session, run_id: str, reason: str) -> Mapping[str, Fault]:
    """Return the groups of a run that may have caused its sudden end, with their faults."""
    run = session.get(RunRow, run_id)
    place = run.place if run is not None else None
    if not isinstance(place, str):  # not said, or damaged
        return _suspects(session, run_id, reason)
    if not place:  # the run was loading, stepping or saving
        return {}
    return {place: Fault(FAILED_RUNS, f"the run was computing it when {reason}")}


def blame(session: Session, run_id: str, culprits: Mapping[str, Fault], *, times: int = 1) -> None:
    """Count a failure against claimed groups; drop those that failed too often.

    culprits: group id -> fault. times: how often it failed, where it is a single group.
    """
    counted = times if len(culprits) == 1 else 1
    most = ATTEMPTS if len(culprits) == 1 else ATTEMPTS_TOGETHER
    for group_id, fault in culprits.items():
        text = fault.text[:DETAIL_LENGTH]
        attempts = session.scalar(
            update(GroupRow)
            .where(GroupRow.group_id == group_id, GroupRow.run_id == run_id)
            .where(GroupRow.status == CLAIMED)
            .values(learn_attempts=GroupRow.learn_attempts + counted, detail=text)
            .returning(GroupRow.learn_attempts)
        )
        if attempts is not None and attempts >= most:
            reasons, texts = {group_id: fault.reason}, {group_id: text}
            drop(session, run_id, reasons, before=CLAIMED, texts=texts)


def _suspects(session: Session, run_id: str, text: str) -> dict[str, Fault]:
    claimed = session.execute(
        select(GroupRow.group_id, GroupRow.learn_attempts).where(
            GroupRow.run_id == run_id, GroupRow.status == CLAIMED
        )
    ).all()
    before = any(attempts for _, attempts in claimed)
    return {
        group_id: Fault(FAILED_RUNS, text)
        for group_id, attempts in claimed
        if attempts or not before
    }
