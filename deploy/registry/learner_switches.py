"""Operator switches for the learner, kept in the store: pause it, or request a run now.

The learn process reads the flags by these names. A request to run stays set until a run meets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.registry import audit
from ingest.reward_watch.asking import Override, ask, read_override, write_override
from sidecar.settings import Watch
from sidecar.store.database import get_flag, set_flag

PAUSED = "learner_paused"
RUN_REQUESTED = "learner_run_requested"
GENERATION = "learner_generation"
"""Counts the operators' actions: a change and its reversal leave another generation."""
ON = "1"
OFF = "0"

Action = Literal["pause", "resume", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    paused: bool
    run_requested: bool
    generation: int = 0

    @property
    def etag(self) -> str:
        """The entity tag. The learner itself only takes a request to run back, which no operator's
        action follows without a new generation: no tag returns."""
        return (
            f'"g{self.generation}{"p" if self.paused else ""}{"r" if self.run_requested else ""}"'
        )


def read(session: Session) -> Switches:
    return Switches(
        paused=get_flag(session, PAUSED) == ON,
        run_requested=get_flag(session, RUN_REQUESTED) == ON,
        generation=_generation(session),
    )


def allowed_actions(switches: Switches) -> list[str]:
    """List the actions that an operator may take on the learner now."""
    return ["resume"] if switches.paused else ["pause", "run"]


def switch(session: Session, action: Action, *, now: float, actor: str, reason: str) -> Switches:
    """Perform an operator's action. Idempotent: an audit row is added only for a change.

    A request to run has an effect only while the learner is not paused.
    """
    before = read(session)
    if action == "run":
        set_flag(session, RUN_REQUESTED, ON, now=now)
    else:
        set_flag(session, PAUSED, ON if action == "pause" else OFF, now=now)
    session.flush()
    after = read(session)
    if after != before:
        _count_up(session, now)
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
    return after


def override(
    session: Session, model: str, settings: Watch, *, now: float, actor: str, reason: str
) -> Override:
    """Let runs go on while the present champion serves, whatever the reward watch found of it.

    What it finds later, by other checks or of another champion, holds again. A run is requested.
    Raises: TransitionError when nothing holds the learner.
    """
    answer = ask(session, model, settings)
    if not answer.holding:
        raise TransitionError(
            f"the reward watch does not hold the learner: {answer.verdict.champion} is champion"
        )
    found = Override(
        champion=answer.verdict.champion, checks=tuple(sorted(answer.verdict.checks)), at=now
    )
    before = read_override(session)
    write_override(session, found)
    set_flag(session, RUN_REQUESTED, ON, now=now)
    _count_up(session, now)
    audit.record(
        session,
        now=now,
        actor=actor,
        action="learner.override",
        subject="learner",
        before={"override": None if before is None else msgspec.structs.asdict(before)},
        after={"override": msgspec.structs.asdict(found), "found": answer.reason},
        reason=reason,
    )
    return found


def _generation(session: Session) -> int:
    text = get_flag(session, GENERATION) or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _count_up(session: Session, now: float) -> None:
    # A damaged number must not hold up a pause; the time in seconds is above any count of changes.
    known = get_flag(session, GENERATION)
    following = _generation(session) + 1 if known is None or _generation(session) else int(now)
    set_flag(session, GENERATION, str(following), now=now)
    session.flush()
