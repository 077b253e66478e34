"""What is known of the noise of the judge that the settings name, for the operator."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.noise.choosing import count_waiting
from ingest.noise.rubrics import each_series, known_noise, series_of
from ingest.noise.state import write_noise_state
from ingest.noise.windows import accept, newest_windows
from ingest.ruler.prompt import hash_of
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


def read_noise(database: Database, judge: Judge, project: str = "") -> KnownNoise:
    """Read the newest windows of this judge with the rubric of a project.

    project: empty: `judge.rubric`. Raises: StoreError.
    """
    hashed = hash_of(judge.of(project))
    with database.read() as session:
        return KnownNoise(
            rubric_hash=hashed,
            waiting=count_waiting(session),
            windows=newest_windows(session, hashed, judge.model),
        )


def accept_now(database: Database, judge: Judge, *, now: float, project: str = "") -> int | None:
    """Compare later windows with the newest whole one of `judge.passes`, and end its alarm.

    project: as for `read_noise`.
    Returns: the number of that window; None when there is none. Raises: StoreError.
    """
    series = series_of(judge, project)
    with database.write() as session:
        row = accept(session, series)
        if row is None:
            return None
        write_noise_state(session, known_noise(session, each_series(judge), now=now))
        return row.window_number
