"""A canary that has just begun its gate, without a store: for what is played, and for tests."""

from __future__ import annotations

from dataclasses import replace

from deploy.records import Canary, trial_of
from sidecar.records import BASE


def begun_canary(*, steps: tuple[int, ...], number: int = 1) -> Canary:
    """Return one whose clock begins at 0. steps: basis points. number: in its id and its salt."""
    trial = trial_of("m", "m--v2", "m--v1", f"salt-{number}")
    return replace(trial, canary_id=f"c{number}", steps=steps, generation=1, anchor=BASE)
