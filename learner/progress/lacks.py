"""What runs lack on the learner's machine, as it found at its start, told to the other processes.

The learner goes on waiting all the same: a card may come back. A run that trains ends the telling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import structlog
from sqlalchemy.orm import Session

from sidecar.store.database import Database, get_flag, set_flag

log = structlog.get_logger()

LACKS_FLAG = "learner_lacks"
"""A line for each; empty: nothing is known to be lacking."""


class Lack(NamedTuple):
    """One thing that a run needs and does not have here."""

    setting: str
    why: str
    """What is wrong, and what to do."""
    level: Literal["error", "warning"] = "error"
    """`error`: no run can work. `warning`: it works with less, or once others leave the device."""


def note_lacks(lacks: Sequence[Lack], database: Database, *, now: float) -> None:
    """Log what runs lack, and store it for `sidecar status`. now: Unix seconds.

    Raises: StoreError.
    """
    for one in lacks:
        event = "learner_cannot_run" if one.level == "error" else "learner_lacks"
        log.warning(event, setting=one.setting, why=one.why)
    with database.write(alone=False) as session:
        write_lacks(session, lacks, now=now)


def write_lacks(session: Session, lacks: Sequence[Lack], *, now: float) -> None:
    """Store what runs lack; nothing: none is known to lack any more."""
    text = "\n".join(" ".join(f"{one.setting}: {one.why}".split()) for one in lacks)
    if (get_flag(session, LACKS_FLAG) or "") != text:
        set_flag(session, LACKS_FLAG, text, now=now)


def read_lacks(session: Session) -> list[str]:
    """Return what runs lack, a sentence each, with the setting in front."""
    return (get_flag(session, LACKS_FLAG) or "").splitlines()
