"""The queue of a model: one canary runs, and at most one waits until it has ended.

The newest request wins: a version that joins takes the place of the one that waits, whether an
operator named it or the learner made it. The one that leaves without a trial is `withdrawn`, with
the reason, and its adapter is what it was before it joined; one that only waited for its first
trial is retired. The queue is rows of the store, so it survives a restart.
"""

from __future__ import annotations

import uuid
from typing import cast, get_args

from sqlalchemy.orm import Session

from deploy.records import AdapterState, Canary
from deploy.registry import audit, canaries, versions
from sidecar.records import BASE
from sidecar.store.database import count
from sidecar.store.models import CanaryRow


def new_row(*, model: str, candidate: str, now: float) -> CanaryRow:
    """Return a queued canary that the session does not have yet. now: Unix seconds."""
    return CanaryRow(
        canary_id=uuid.uuid4().hex,
        model=model,
        candidate=candidate,
        champion=BASE,
        state="queued",
        paused=False,
        reason=None,
        step=0,
        salt=uuid.uuid4().hex,
        created_at=now,
        step_started_at=now,
        ended_at=None,
        evidence={},
        generation=1,
    )


def join(
    session: Session,
    *,
    model: str,
    candidate: str,
    steps: tuple[int, ...],
    runs: str,
    now: float,
    actor: str,
    reason: str,
) -> Canary:
    """Queue a version behind the canary that runs, in the place of the one that waits.

    runs: the adapter whose canary runs. Asked again for the version that waits, its canary is
    returned and nothing is written.
    """
    waits = canaries.queued_row(session, model)
    if waits is not None and waits.candidate == candidate:
        return canaries.to_canary(waits)
    if waits is not None:
        left = f"superseded by {candidate}"
        withdraw(session, waits, reason=left, now=now, actor=actor)
    row = new_row(model=model, candidate=candidate, now=now)
    row.champion = versions.champion(session, model)
    row.reason = f"queued behind the canary of {runs}"
    version = versions.find(session, candidate)
    row.evidence = {
        "steps": list(steps),
        "queued": {"at": now, "by": actor, "state": version.state, "reason": version.reason},
    }
    session.add(row)
    versions.set_state(session, candidate, "registered", row.reason)
    session.flush()
    _told(session, row, before={}, now=now, actor=actor, reason=reason)
    return canaries.to_canary(row)


def withdraw(session: Session, row: CanaryRow, *, reason: str, now: float, actor: str) -> None:
    """Take a queued canary out of the queue, in the caller's write transaction."""
    before = {"phase": row.state}
    was = canaries.entry(row, "queued")
    row.state, row.reason, row.ended_at = "withdrawn", reason, now
    row.generation = canaries.to_canary(row).generation + 1
    state, why = was.get("state"), was.get("reason")
    if state in get_args(AdapterState) and state != "registered":
        kept = why if isinstance(why, str) else None
        versions.set_state(session, row.candidate, cast(AdapterState, state), kept)
    else:
        versions.set_state(session, row.candidate, "retired", reason)
    count(session, "canary", "withdrawn")
    session.flush()
    _told(session, row, before=before, now=now, actor=actor, reason=reason)


def _told(
    session: Session,
    row: CanaryRow,
    *,
    before: dict[str, str],
    now: float,
    actor: str,
    reason: str,
) -> None:
    audit.record(
        session,
        now=now,
        actor=actor,
        action=f"canary.{row.state}",
        subject=row.canary_id,
        before=before,
        after={"canary_id": row.canary_id, "phase": row.state, "candidate": row.candidate},
        reason=reason,
    )
