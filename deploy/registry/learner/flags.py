"""The learner's flags in the store, and its pause. A rollback imports this and nothing heavier."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from deploy.registry import audit
from sidecar.store.database import get_flag, set_flag

PAUSED = "learner_paused"
RUN_REQUESTED = "learner_run_requested"
GENERATION = "learner_generation"
"""Counts the operators' actions: a change and its reversal leave another generation."""
ON = "1"
OFF = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    paused: bool
    run_requested: bool
    generation: int = 0

    @property
    def etag(self) -> str:
        """The entity tag. The learner itself only takes a request to run back, which no operator's
        action follows without a new generation: no tag returns."""
        marks = ("p" if self.paused else "") + ("r" if self.run_requested else "")
        return f'"g{self.generation}{marks}"'


def read(session: Session) -> Switches:
    return Switches(
        paused=get_flag(session, PAUSED) == ON,
        run_requested=get_flag(session, RUN_REQUESTED) == ON,
        generation=_generation(session),
    )


def set_paused(session: Session, paused: bool, *, now: float, actor: str, reason: str) -> bool:
    """Pause or resume the learner, in the caller's transaction. Returns: False: it was so before.

    An audit row is added only for a change.
    """
    before = read(session)
    if before.paused == paused:
        return False
    set_flag(session, PAUSED, ON if paused else OFF, now=now)
    count_up(session, now)
    told(session, "pause" if paused else "resume", before, now=now, actor=actor, reason=reason)
    return True


def told(
    session: Session, action: str, before: Switches, *, now: float, actor: str, reason: str
) -> None:
    """Add the audit row of an operator's action."""
    after = read(session)
    audit.record(
        session,
        now=now,
        actor=actor,
        action=f"learner.{action}",
        subject="learner",
        before={"paused": before.paused, "run_requested": before.run_requested},
        after={"paused": after.paused, "run_requested": after.run_requested},
        reason=reason,
    )


def count_up(session: Session, now: float) -> None:
    """Give the switches their next generation."""
    # A damaged number must not hold up a pause; the time in seconds is above any count of changes.
    known = get_flag(session, GENERATION)
    following = _generation(session) + 1 if known is None or _generation(session) else int(now)
    set_flag(session, GENERATION, str(following), now=now)
    session.flush()


def _generation(session: Session) -> int:
    text = get_flag(session, GENERATION) or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
