"""A canary that has just begun its gate, without a store: for what is played, and for tests."""

from __future__ import annotations

from deploy.records import Canary


def begun_canary(*, steps: tuple[int, ...], number: int = 1) -> Canary:
    """Return one whose clock begins at 0. steps: basis points. number: in its id and its salt."""
    return Canary(
        canary_id=f"c{number}",
        model="m",
        candidate="m--v2",
        champion="m--v1",
        phase="gating",
        paused=False,
        reason=None,
        step=0,
        steps=steps,
        salt=f"salt-{number}",
        created_at=0.0,
        step_started_at=0.0,
        stopped_s=0.0,
        stopped_at=None,
        ended_at=None,
        generation=1,
    )
