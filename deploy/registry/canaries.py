"""Read canaries from the store. Only this module knows the layout of a `canary` row.

Values without a column of their own are in the row's `evidence` object, under the keys `steps`,
`queued`, `waived_step`, `anchor`, `tries`, `tried_since`, `clock`, `probe`, `loading`, `gate`,
`ramp`, `quality`, `guards`, `step_<n>`, `metrics`, `approval`, `breaker` and `tick_errors`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.errors import UnknownCanaryError
from deploy.evidence.live import TOLD, Approval, MetricState
from deploy.records import ACTIVE_PHASES, AdapterState, Canary, Phase
from deploy.registry import audit, versions
from sidecar.records import BASE
from sidecar.routing.table import BUCKETS
from sidecar.store.database import count
from sidecar.store.models import BreakerTripRow, CanaryRow


def to_canary(row: CanaryRow) -> Canary:
    """Convert a row of the store to a record.

    A canary whose evidence was lost has no steps: its weight is 0, and `decide` ends it.
    """
    evidence, clock, errors = row.evidence, entry(row, "clock"), entry(row, "tick_errors")
    gate, ramp, approval = (entry(row, name) for name in ("gate", "ramp", "approval"))
    return Canary(
        canary_id=row.canary_id,
        model=row.model,
        candidate=row.candidate,
        champion=row.champion,
        phase=cast(Phase, row.state),
        paused=row.paused,
        reason=row.reason,
        step=row.step,
        steps=_steps(evidence),
        salt=row.salt,
        created_at=row.created_at,
        step_started_at=row.step_started_at,
        stopped_s=clock.get("stopped_s", 0.0),
        stopped_at=clock.get("stopped_at"),
        ended_at=row.ended_at,
        generation=row.generation,
        taken_out=evidence.get("breaker"),
        tick_errors=errors.get("count", 0),
        tick_error_at=errors.get("at", 0.0),
        anchor=evidence.get("anchor") or BASE,
        ramp_began_at=ramp.get("began_at", 0.0),
        ramp_after_seq=ramp.get("after_seq", 0),
        ramp_after_told=ramp.get("after_told", 0),
        told=client_guard_texts(entry(row, "guards")),
        proven=frozenset(entry(row, "quality").get("proven") or ()),
        gate_judges=tuple(gate.get("judges") or ()),
        metrics=msgspec.convert(entry(row, "metrics"), dict[str, MetricState]),
        approval=msgspec.convert(approval, Approval) if approval else None,
        waived_step=evidence.get("waived_step"),
        tries=tuple(evidence.get("tries") or ()),
        tried_since=evidence.get("tried_since"),
        judge_gives_reward=gate.get("judge_gives_reward"),
    )


def add_evidence(row: CanaryRow, /, **entries: Any) -> None:  # Any: JSON
    """Add entries to the evidence of a row; an entry replaces an earlier one of its name."""
    # A new object: the session does not notice a change inside the old one.
    row.evidence = {**row.evidence, **entries}


def entry(row: CanaryRow, name: str) -> dict[str, Any]:  # Any: JSON
    """Return an object of the evidence; empty when there is none of this name."""
    value = row.evidence.get(name)
    return value if isinstance(value, dict) else {}


def client_guard_texts(guards: Mapping[str, Any]) -> tuple[str, ...]:  # Any: JSON
    """Return what clients told of both arms, in words."""
    found = (guards.get(kind) for kind in TOLD)
    return tuple(one["says"] for one in found if isinstance(one, dict) and one.get("says"))


def _steps(evidence: dict[str, Any]) -> tuple[int, ...]:  # Any: JSON
    steps = evidence.get("steps")
    if not isinstance(steps, list):
        return ()
    if not all(isinstance(one, int) and 0 <= one <= BUCKETS for one in steps):
        return ()
    return tuple(steps)


def breaker_trip(session: Session, canary: Canary) -> str | None:
    """Return why a proxy's breaker took the candidate out of traffic; None when none did."""
    row = session.get(BreakerTripRow, (canary.model, canary.candidate, canary.salt))
    return row.reason if row is not None else None


def active_row(session: Session, model: str) -> CanaryRow | None:
    """Return the row of the model's active canary, for a writer. At most one is active."""
    statement = (
        select(CanaryRow)
        .where(CanaryRow.model == model, CanaryRow.state.in_(ACTIVE_PHASES))
        .order_by(CanaryRow.created_at)
    )
    return session.scalars(statement).first()


def queued_row(session: Session, model: str) -> CanaryRow | None:
    """Return the row of the model's queued canary, for a writer. At most one is queued."""
    statement = (
        select(CanaryRow)
        .where(CanaryRow.model == model, CanaryRow.state == "queued")
        .order_by(CanaryRow.created_at.desc())
    )
    return session.scalars(statement.limit(1)).first()


def queued(session: Session, model: str) -> Canary | None:
    """Return the model's queued canary, or None."""
    row = queued_row(session, model)
    return to_canary(row) if row is not None else None


def active(session: Session, model: str) -> Canary | None:
    """Return the model's active canary, or None."""
    row = active_row(session, model)
    return to_canary(row) if row is not None else None


def find_row(session: Session, canary_id: str, line: str | None = None) -> CanaryRow:
    """Return the row of a canary by its id; with a line only of it. Raises: UnknownCanaryError."""
    row = session.get(CanaryRow, canary_id)
    if row is None or line not in (None, row.model):
        raise UnknownCanaryError(
            f"no canary {canary_id}; `sidecar canary get` shows the active one"
        )
    return row


def canary_of(session: Session, candidate: str) -> CanaryRow | None:
    """Return the newest canary of this adapter, active or ended."""
    statement = select(CanaryRow).where(CanaryRow.candidate == candidate)
    return session.scalars(statement.order_by(CanaryRow.created_at.desc()).limit(1)).first()


def earlier_tries(
    session: Session, model: str, candidate: str, champion: str, anchor: str
) -> list[Canary]:
    """List the ended canaries of a candidate against this champion and anchor, the oldest first."""
    row = CanaryRow
    ended = select(row).where(
        row.candidate == candidate,
        row.model == model,
        row.champion == champion,
        row.ended_at.is_not(None),
    )
    found = [to_canary(one) for one in session.scalars(ended.order_by(row.created_at))]
    return [one for one in found if one.anchor == anchor and one.phase != "withdrawn"]


def etag(canary: Canary) -> str:
    """Return the entity tag that `If-Match` is compared with."""
    return f'"g{canary.generation}"'


# The queue of a model: one canary runs, and at most one waits until it has ended.


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
    waits = queued_row(session, model)
    if waits is not None and waits.candidate == candidate:
        return to_canary(waits)
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
    return to_canary(row)


def withdraw(session: Session, row: CanaryRow, *, reason: str, now: float, actor: str) -> None:
    """Take a queued canary out of the queue, in the caller's write transaction."""
    before = {"phase": row.state}
    was = entry(row, "queued")
    row.state, row.reason, row.ended_at = "withdrawn", reason, now
    row.generation = to_canary(row).generation + 1
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
