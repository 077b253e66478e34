"""What the schedule does now, told to the other processes in a flag of the store."""

from __future__ import annotations

import msgspec
from sqlalchemy.orm import Session

from sidecar.lines import flag_of
from sidecar.store.database import get_flag, set_flag

SCHEDULE_FLAG = "learner_schedule"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The newest decision of the schedule."""

    kind: str
    """`learner.schedule.rule.Kind`"""
    why: str
    at: float
    """Unix seconds; it is written at least every minute while the learner lives."""
    again_at: float | None = None
    """Unix seconds when the hold after the last run ends; None: none holds."""


def write_told(session: Session, told: Told, line: str) -> None:
    """line: name of the line of adapters whose schedule tells."""
    set_flag(session, flag_of(SCHEDULE_FLAG, line), msgspec.json.encode(told).decode(), now=told.at)


def read_told(session: Session, line: str) -> Told | None:
    """Return the newest decision of a line; None before the first, and for a damaged one."""
    found = get_flag(session, flag_of(SCHEDULE_FLAG, line))
    try:
        return msgspec.json.decode(found or "null", type=Told | None)
    except msgspec.MsgspecError:
        return None
