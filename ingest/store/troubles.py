"""Why sampling waits: a row of the `flag` table, for `sidecar status`."""

from __future__ import annotations

import msgspec
import structlog
from sqlalchemy.orm import Session

from sidecar.store.database import get_flag, set_flag

log = structlog.get_logger()
SAMPLING_WAITS = "trouble_sampling"
MAX_WHY = 500
"""Characters of a reason that are kept."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why sampling waits, as it last wrote it."""

    since: float
    """Unix seconds."""
    why: str
    until: float | None = None
    """When it ends by itself; None: not known."""


_encoder = msgspec.json.Encoder()


def write_trouble(session: Session, name: str, trouble: Trouble | None, *, now: float) -> None:
    """Write why a worker waits, or that it does not. Writes nothing when that is known."""
    text = "" if trouble is None else _encoder.encode(trouble).decode()
    if (get_flag(session, name) or "") != text:
        set_flag(session, name, text, now=now)


def read_trouble(session: Session, name: str, *, now: float) -> Trouble | None:
    """Return why a worker waits; None when it does not, or the row is damaged."""
    text = get_flag(session, name)
    if not text:
        return None
    try:
        trouble = msgspec.json.decode(text, type=Trouble)
    except msgspec.MsgspecError:
        log.warning("trouble_unreadable", name=name)
        return None
    return None if trouble.until is not None and trouble.until <= now else trouble
