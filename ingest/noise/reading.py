"""What is known of the noise of the judge that the settings name, for the operator."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.noise.choosing import count_waiting
from ingest.noise.state import write_noise_state
from ingest.noise.windows import Series, accept, current, newest_windows
from ingest.ruler.prompt import rubric_hash
from sidecar.settings import Judge
from sidecar.store.database import Database
from sidecar.store.models import JudgeNoiseRow


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNoise:
    rubric_hash: str
    waiting: int
    """Groups that wait to be scored again."""
    windows: list[JudgeNoiseRow]
    """The newest first."""


def read_noise(database: Database, judge: Judge) -> KnownNoise:
    """Read the newest windows of this judge with this rubric. Raises: StoreError."""
    hashed = rubric_hash(judge.rubric, show_reasoning=judge.show_reasoning)
    with database.read() as session:
        return KnownNoise(
            rubric_hash=hashed,
            waiting=count_waiting(session),
            windows=newest_windows(session, hashed, judge.model),
        )


def accept_now(database: Database, judge: Judge, *, now: float) -> int | None:
    """Compare later windows with the newest whole one of `judge.passes`, and end its alarm.

    Returns: the number of that window; None when there is none. Raises: StoreError.
    """
    hashed = rubric_hash(judge.rubric, show_reasoning=judge.show_reasoning)
    series = Series(rubric_hash=hashed, judge_model=judge.model, passes=judge.passes)
    with database.write() as session:
        row = accept(session, series)
        if row is None:
            return None
        write_noise_state(session, current(session, series, now=now))
        return row.window_number
