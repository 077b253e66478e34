"""Operator switches for the learner, kept in the store: pause it, or request a run now.

The learn process reads the flags by these names. A request to run stays set until a run meets it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.registry import audit
from deploy.registry.flags import ON, RUN_REQUESTED, Switches, add_audit, count_up, read, set_paused
from ingest.reward_watch.store import Override, ask, read_override, write_override
from sidecar.lines import PAUSED, flag_of, learner_of
from sidecar.settings import Watch
from sidecar.store.database import set_flag

Action = Literal["pause", "resume", "run"]

__all__ = ["PAUSED", "RUN_REQUESTED", "Switches", "allowed_actions", "override", "read", "switch"]


def allowed_actions(switches: Switches) -> list[str]:
    """List the actions that an operator may take on the learner now."""
    return ["resume"] if switches.paused else ["pause", "run"]


def switch(
    session: Session, line: str, action: Action, *, now: float, actor: str, reason: str
) -> Switches:
    """Perform an operator's action. Idempotent: an audit row is added only for a change.

    line: name of the line of adapters. A request to run has an effect only while the learner is not
        paused.
    """
    before = read(session, line)
    if action == "run":
        if not before.run_requested:
            set_flag(session, flag_of(RUN_REQUESTED, line), ON, now=now)
            count_up(session, line, now)
            add_audit(session, line, action, before, now=now, actor=actor, reason=reason)
    else:
        set_paused(session, line, action == "pause", now=now, actor=actor, reason=reason)
    return read(session, line)


def override(
    session: Session, model: str, settings: Watch, *, now: float, actor: str, reason: str
) -> Override:
    """Let runs go on while the present champion serves, whatever the reward watch found of it.

    What it finds later, by other checks or of another champion, holds again. A run is requested.
    model: name of the line of adapters.
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
    before = read_override(session, model)
    write_override(session, model, found)
    set_flag(session, flag_of(RUN_REQUESTED, model), ON, now=now)
    count_up(session, model, now)
    audit.record(
        session,
        now=now,
        actor=actor,
        action="learner.override",
        subject=learner_of(model),
        before={"override": None if before is None else msgspec.structs.asdict(before)},
        after={"override": msgspec.structs.asdict(found), "found": answer.reason},
        reason=reason,
    )
    return found
