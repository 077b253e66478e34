"""What the status says of each line of adapters."""

from __future__ import annotations

from sqlalchemy.orm import Session

from deploy.admin.out import Out
from deploy.registry import canaries, versions
from deploy.registry.learner import switches
from sidecar.lines import Line


class LineOut(Out):
    """One line of adapters, in short; `GET /status?project=` has all of it."""

    name: str
    """What the names of its adapters begin with."""
    project: str | None
    """Whose line it is; null: the default line, which all other projects share."""
    champion: str
    canary: str | None
    """The candidate on canary; null: none is."""
    canary_phase: str | None
    canary_weight_bp: int
    canary_paused: bool = False
    learner_paused: bool


def line_out(session: Session, line: Line) -> LineOut:
    """Sum up a line of adapters."""
    canary = canaries.active(session, line.name)
    return LineOut(
        name=line.name,
        project=line.project,
        champion=versions.champion(session, line.name),
        canary=None if canary is None else canary.candidate,
        canary_phase=None if canary is None else canary.phase,
        canary_weight_bp=0 if canary is None else canary.weight_bp,
        canary_paused=canary is not None and canary.paused,
        learner_paused=switches.read(session, line.name).paused,
    )
