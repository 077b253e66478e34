"""Operator switches for the learner, kept in the store: pause it, or request a run now.

The learn process reads the flags by these names. A request to run stays set until a run meets it.
"""

from __future__ import annotations

import hashlib
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
ON = "1"
OFF = "0"

Action = Literal["pause", "resume", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    paused: bool
    run_requested: bool

    @property
    def etag(self) -> str:
        """The entity tag: it encodes the state, so a change and its reversal give the same tag."""
        text = f"{self.paused} {self.run_requested}"
        return f'"{hashlib.sha256(text.encode()).hexdigest()[:12]}"'


def read(session: Session) -> Switches:
    return Switches(
        paused=get_flag(session, PAUSED) == ON,
        run_requested=get_flag(session, RUN_REQUESTED) == ON,
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
