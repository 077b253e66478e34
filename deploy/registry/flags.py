"""The learner's flags in the store, and its pause. A rollback imports this and nothing heavier."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from deploy.registry import audit
from sidecar.lines import PAUSED, flag_of, learner_of
from sidecar.store.database import get_flag, set_flag

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


def read(session: Session, line: str) -> Switches:
    """Return the switches of a line of adapters, by its name."""
    return Switches(
        paused=get_flag(session, flag_of(PAUSED, line)) == ON,
        run_requested=get_flag(session, flag_of(RUN_REQUESTED, line)) == ON,
        generation=_generation(session, line),
    )


def set_paused(
    session: Session, line: str, paused: bool, *, now: float, actor: str, reason: str
) -> bool:
    """Pause or resume the learner in one line of adapters, in the caller's transaction.

    An audit row is added only for a change. Returns: False: it was so before.
    """
    before = read(session, line)
    if before.paused == paused:
        return False
    set_flag(session, flag_of(PAUSED, line), ON if paused else OFF, now=now)
    count_up(session, line, now)
    action = "pause" if paused else "resume"
    add_audit(session, line, action, before, now=now, actor=actor, reason=reason)
    return True


def add_audit(
    session: Session,
    line: str,
    action: str,
    before: Switches,
    *,
    now: float,
    actor: str,
    reason: str,
) -> None:
    """Add the audit row of an operator's action."""
    after = read(session, line)
    audit.record(
        session,
        now=now,
        actor=actor,
        action=f"learner.{action}",
        subject=learner_of(line),
        before={"paused": before.paused, "run_requested": before.run_requested},
        after={"paused": after.paused, "run_requested": after.run_requested},
        reason=reason,
    )


def count_up(session: Session, line: str, now: float) -> None:
    """Give the switches of a line their next generation."""
    following = _generation(session, line) + 1
    set_flag(session, flag_of(GENERATION, line), str(following), now=now)
    session.flush()


def _generation(session: Session, line: str) -> int:
    return int(get_flag(session, flag_of(GENERATION, line)) or 0)
