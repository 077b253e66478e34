"""Read canaries from the store. Only this module knows the layout of a `canary` row.

Values without a column of their own are in the row's `evidence` object, under the keys `steps`,
`queued`, `waived_step`, `anchor`, `tries`, `tried_since`, `clock`, `probe`, `loading`, `gate`,
`ramp`, `quality`, `guards`, `step_<n>`, `metrics`, `approval`, `breaker` and `tick_errors`.
"""

from __future__ import annotations

import uuid
from typing import Any, cast, get_args

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.errors import UnknownCanaryError
from deploy.evidence.live import Approval, MetricState
from deploy.records import ACTIVE_PHASES, AdapterState, Canary, Phase
from deploy.registry import audit, versions
from sidecar.records import BASE
from sidecar.routing.table import BUCKETS, is_adapter_name
from sidecar.store.database import count
from sidecar.store.models import BreakerTripRow, CanaryRow

_LARGEST = 2**53
"""Larger numbers are damage: no time in seconds and no count here comes near it."""


def to_canary(row: CanaryRow) -> Canary:
    """Convert a row of the store to a record. Never fails for a damaged row.

    A canary whose ramp cannot be read has no steps: its weight is 0, and `decide` ends it. Other
    numbers that cannot be read are 0.
    """
    evidence, clock, errors = evidence_of(row), entry(row, "clock"), entry(row, "tick_errors")
    stopped_at, gate = clock.get("stopped_at"), entry(row, "gate")
    ramp, anchor = entry(row, "ramp"), evidence.get("anchor")
    gives = gate.get("judge_gives_reward")
    return Canary(
        canary_id=row.canary_id,
        model=row.model,
        candidate=row.candidate,
        champion=row.champion,
        phase=cast(Phase, row.state),
        paused=row.paused,
        reason=row.reason,
        step=_whole(row.step, -1),
        steps=_steps(evidence),
        salt=row.salt,
        created_at=_number(row.created_at),
        step_started_at=_number(row.step_started_at),
        stopped_s=_number(clock.get("stopped_s")),
        stopped_at=None if stopped_at is None else _number(stopped_at),
        ended_at=None if row.ended_at is None else _number(row.ended_at),
        generation=_whole(row.generation, 0),
        taken_out=evidence.get("breaker"),
        tick_errors=_whole(errors.get("count"), 0),
        tick_error_at=_number(errors.get("at")),
        anchor=str(anchor) if is_adapter_name(anchor) else BASE,
        ramp_began_at=_number(ramp.get("began_at")),
        ramp_after_seq=_whole(ramp.get("after_seq"), 0),
        proven=frozenset(_names(entry(row, "quality").get("proven"))),
        gate_judges=_names(gate.get("judges")),
        metrics=_metrics(entry(row, "metrics")),
        approval=_approval(entry(row, "approval")),
        waived_step=_waived(evidence.get("waived_step")),
        tries=_names(evidence.get("tries")),
        tried_since=_number(evidence["tried_since"]) if "tried_since" in evidence else None,
        judge_gives_reward=gives if isinstance(gives, bool) else None,
    )


def evidence_of(row: CanaryRow) -> dict[str, Any]:  # Any: JSON
    """Return the evidence of a row; empty when the column holds no JSON object."""
    return row.evidence if isinstance(row.evidence, dict) else {}


def add_evidence(row: CanaryRow, /, **entries: Any) -> None:  # Any: JSON
    """Add entries to the evidence of a row; an entry replaces an earlier one of its name."""
    # A new object: the session does not notice a change inside the old one.
    row.evidence = {**evidence_of(row), **entries}


def entry(row: CanaryRow, name: str) -> dict[str, Any]:  # Any: JSON
    """Return an object of the evidence; empty when there is none of this name."""
    value = evidence_of(row).get(name)
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float:
    known = isinstance(value, int | float) and -_LARGEST < value < _LARGEST  # False for NaN too
    return cast(float, value) if known else 0.0


def _whole(value: object, damaged: int) -> int:
    return value if isinstance(value, int) and -_LARGEST < value < _LARGEST else damaged


def _metrics(stored: dict[str, Any]) -> dict[str, MetricState]:  # Any: JSON
    """A metric whose record is damaged begins anew."""
    found: dict[str, MetricState] = {}
    for name, value in stored.items():
        try:
            found[str(name)] = msgspec.convert(value, MetricState)
        except msgspec.ValidationError:
            continue
    return found


def _approval(stored: dict[str, Any]) -> Approval | None:  # Any: JSON
    """The service is asked anew when the record is damaged."""
    try:
        return msgspec.convert(stored, Approval) if stored else None
    except msgspec.ValidationError:
        return None


def _waived(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _names(value: object) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


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


def is_there(session: Session, canary_id: str) -> bool:
    """Return True when the store finds this canary by its id. False: the id is damaged."""
    known = select(CanaryRow.state).where(CanaryRow.canary_id == canary_id)
    return session.scalar(known) is not None


def find_row(session: Session, canary_id: str) -> CanaryRow:
    """Return the row of a canary by its id. Raises: UnknownCanaryError."""
    row = session.get(CanaryRow, canary_id)
    if row is None:
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
