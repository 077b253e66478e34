"""The series of the judge that the settings name: one for each rubric.

A project with a rubric of its own has a series of its own. What the operator sees is one state:
that of `judge.rubric`, unless the scores of another rubric drift, or are the only ones measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import msgspec
from sqlalchemy.orm import Session

from ingest.noise.state import NoiseState
from ingest.noise.windows import Series, current
from ingest.ruler.prompt import hash_of
from sidecar.settings import Judge


def series_of(judge: Judge, project: str = "") -> Series:
    """Return the series of the scores of a project; of `judge.rubric` without one."""
    return Series(
        rubric_hash=hash_of(judge.of(project)), judge_model=judge.model, passes=judge.passes
    )


def each_series(judge: Judge, *, model: str = "") -> Mapping[Series, str]:
    """Return every series with the project that it is of: "" for `judge.rubric`, which is first.

    model: the judge's name, where it is not that of the settings. Two projects with the same
    rubric share a series; it is under the first.
    """
    found: dict[Series, str] = {}
    for project in chain([""], judge.projects):
        series = replace(series_of(judge, project), judge_model=model or judge.model)
        found.setdefault(series, project)
    return found


def known_noise(session: Session, series: Mapping[Series, str], *, now: float) -> NoiseState:
    """Sum up what is known of the judge.

    series: as `each_series` returns them.
    Returns: the state of the first series that drifts; else of the first that is measured; else of
    the first.
    """
    states = [
        msgspec.structs.replace(current(session, one, now=now), project=project)
        for one, project in series.items()
    ]
    drifting = (state for state in states if state.drift)
    measured = (state for state in states if state.sd is not None)
    return next(chain(drifting, measured, states))
