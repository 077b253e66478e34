"""Errors of the controller that a canary caused: counted in a row, and too many end the canary.

The count is in the store, with the canary, so that a restart does not begin anew. An error of the
store, of vLLM or of the disk is no canary's fault and does not come here.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from deploy.errors import error_line
from deploy.records import AdapterState, Canary
from deploy.registry import transitions
from deploy.registry.canary_rule import Decision, Hold, Move
from sidecar.store.database import count

MAX_TICK_ERRORS = 5
"""As many as vLLM has to load an adapter. With the waits between them they span 30 s: longer than a
lack of threads or descriptors that will pass, shorter than the next candidate should wait."""
FIRST_WAIT_S = 2.0


def waits(canary: Canary, now: float) -> bool:
    """True while the next try after an error is not due: 2 s, doubling with each."""
    if not canary.tick_errors:
        return False
    wait_s = FIRST_WAIT_S * 2.0 ** (canary.tick_errors - 1)
    return 0.0 <= now - canary.tick_error_at < wait_s


def record(session: Session, canary: Canary, error: Exception, *, now: float) -> bool:
    """Count an error, and end the canary at the last try. Returns: True when it ended.

    Works in the caller's write transaction.
    """
    reason, tries = error_line(error), canary.tick_errors + 1
    count(session, "tick", type(error).__name__[:64])
    decision: Decision
    if tries < MAX_TICK_ERRORS:
        decision = Hold(reason=f"try {tries} of {MAX_TICK_ERRORS}: {reason}", stops_clock=True)
    else:
        state: AdapterState = "rolled_back" if canary.phase == "ramping" else "rejected"
        decision = Move(
            to="rolled_back",
            candidate_state=state,
            reason=f"{tries} tries in a row ended with an error, the last with {reason}",
        )
    evidence = {"tick_errors": {"count": tries, "at": now, "last": reason}}
    applied = transitions.apply(session, canary, decision, evidence=evidence, now=now)
    return applied and isinstance(decision, Move)
