"""The noise of the judge that scores now, for status, doctor and metrics: a row of `flag`."""

from __future__ import annotations

import msgspec
import structlog
from sqlalchemy.orm import Session

from sidecar.store.database import get_flag, set_flag

FLAG = "judge_noise"

log = structlog.get_logger()


class NoiseState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the judge's noise. Figures are None before two groups were scored twice."""

    at: float
    """Unix seconds."""
    judge_model: str
    rubric_hash: str
    passes: int
    project: str = ""
    """Project whose rubric it is; empty: `judge.rubric`."""
    groups: int = 0
    """Groups that the figures come from: those of one window."""
    whole: bool = False
    """The window has all its groups."""
    sd: float | None = None
    sd_low: float | None = None
    sd_high: float | None = None
    slope: float | None = None
    slope_low: float | None = None
    slope_high: float | None = None
    flips: float | None = None
    drift: str = ""
    """What changed, as of the newest whole window; empty: nothing did."""
    drift_at: float | None = None
    """When the newest whole window showed it."""


def read_noise_state(session: Session) -> NoiseState | None:
    """Return what score last wrote; None when it wrote nothing, or the row is damaged."""
    found = get_flag(session, FLAG)
    try:
        return None if not found else msgspec.json.decode(found, type=NoiseState)
    except msgspec.MsgspecError:
        log.warning("judge_noise_state_unreadable")
        return None


def write_noise_state(session: Session, state: NoiseState) -> None:
    set_flag(session, FLAG, msgspec.json.encode(state).decode(), now=state.at)
