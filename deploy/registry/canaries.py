"""Read canaries from the store. Only this module knows the layout of a `canary` row.

Values without a column of their own are in the row's `evidence` object, under the keys `steps`,
`clock`, `probe`, `loading`, `gate`, `step_<n>`, `breaker` and `tick_errors`.
"""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.errors import UnknownCanaryError
from deploy.records import ACTIVE_PHASES, Canary, Phase
from sidecar.store.models import BreakerTripRow, CanaryRow


def to_canary(row: CanaryRow) -> Canary:
    """Convert a row of the store to a record. Never fails for damaged evidence.

    A canary whose `steps` cannot be read has none: its weight is 0, and `decide` ends it.
    """
    evidence = evidence_of(row)
    clock, errors = _entry(evidence, "clock"), _entry(evidence, "tick_errors")
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
    )


def evidence_of(row: CanaryRow) -> dict[str, Any]:  # Any: JSON
    """Return the evidence of a row; empty when the column holds no JSON object."""
    return row.evidence if isinstance(row.evidence, dict) else {}


def clock_of(row: CanaryRow) -> dict[str, Any]:  # Any: JSON
    """Return the evidence's entry `clock`, which says when the canary's clock stopped."""
    return _entry(evidence_of(row), "clock")


def _entry(evidence: dict[str, Any], name: str) -> dict[str, Any]:  # Any: JSON
    value = evidence.get(name)
    return value if isinstance(value, dict) else {}


def _steps(evidence: dict[str, Any]) -> tuple[int, ...]:  # Any: JSON
    steps = evidence.get("steps")
    if not isinstance(steps, list) or not all(isinstance(one, int) for one in steps):
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


def active(session: Session, model: str) -> Canary | None:
    """Return the model's active canary, or None."""
    row = active_row(session, model)
    return to_canary(row) if row is not None else None


def find_row(session: Session, canary_id: str) -> CanaryRow:
    """Return the row of a canary by its id. Raises: UnknownCanaryError."""
    row = session.get(CanaryRow, canary_id)
    if row is None:
        raise UnknownCanaryError(
            f"no canary {canary_id}; `sidecar canary get` shows the active one"
        )
    return row


def canary_of(session: Session, candidate: str) -> CanaryRow | None:
    """Return the canary of this adapter, active or ended. An adapter has at most one."""
    return session.scalar(select(CanaryRow).where(CanaryRow.candidate == candidate))


def etag(canary: Canary) -> str:
    """Return the entity tag that `If-Match` is compared with."""
    return f'"g{canary.generation}"'
