"""Controller errors caused by a canary: too many in a row end the canary.

The count is kept with the canary in the store, so it survives a restart. An error of the store, of
vLLM or of the disk is not caused by a canary and is not counted here.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from deploy.errors import error_line
from deploy.records import AdapterState, Canary
from deploy.registry import transitions
from deploy.registry.canary_rule import Decision, Hold, Move
from sidecar.backoff import Backoff
from sidecar.plurals import counted
from sidecar.store.database import count

MAX_TICK_ERRORS = 5
"""Consecutive errors that end a canary. With the waits between them they span 30 s: longer than a
passing lack of threads or descriptors, shorter than the next candidate should wait."""
WAITS = Backoff(first_s=2.0)


def waits(canary: Canary, now: float) -> bool:
    """Return True while the retry after an error is not due: 2 s, doubling with each error."""
    if not canary.tick_errors:
        return False
    return 0.0 <= now - canary.tick_error_at < WAITS.wait_s(canary.tick_errors)


def record(session: Session, canary: Canary, error: Exception, *, now: float) -> bool:
    """Count an error, and end the canary at the last one. Returns: True when it ended.

    Works in the caller's write transaction.
    """
    reason, tries = error_line(error), canary.tick_errors + 1
    count(session, "tick", type(error).__name__[:64])
    decision: Decision
    if tries < MAX_TICK_ERRORS:
        decision = Hold(reason=f"try {tries} of {MAX_TICK_ERRORS}: {reason}", stops_clock=True)
    else:
        state: AdapterState = "rolled_back" if canary.phase == "ramping" else "rejected"
        in_a_row = counted(tries, "try", "tries")
        decision = Move(
            to="rolled_back",
            candidate_state=state,
            reason=f"{in_a_row} in a row ended with an error, the last with {reason}",
        )
    evidence = {"tick_errors": {"count": tries, "at": now, "last": reason}}
    applied = transitions.apply(session, canary, decision, evidence=evidence, now=now, ban=False)
    return applied and isinstance(decision, Move)
