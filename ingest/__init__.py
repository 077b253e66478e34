"""From recorded traffic to scored groups of answers: selection, sampling, judging.

RULER's functions are here for programs without a sidecar: `from ingest import ruler_scores`. They
are loaded when they are asked for, so that the import of the package stays light. So is
`serve_runner`, which serves an agent as a runner of rehearsals.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.tasks.runner import serve_runner
    from ingest.trajectories.records import Trajectory, TrajectoryGroup, TrajectoryScore
    from ingest.trajectories.scoring import (
        ruler_score_group,
        ruler_score_group_sync,
        ruler_scores,
        ruler_scores_sync,
    )

__all__ = [
    "Trajectory",
    "TrajectoryGroup",
    "TrajectoryScore",
    "ruler_score_group",
    "ruler_score_group_sync",
    "ruler_scores",
    "ruler_scores_sync",
    "serve_runner",
]
_HOMES = {
    name: f"ingest.trajectories.{'scoring' if name.startswith('ruler') else 'records'}"
    for name in __all__
} | {"serve_runner": "ingest.tasks.runner"}


def __getattr__(name: str) -> Any:  # PEP 562
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
