"""A canary for tests of pure rules: what a test does not name is of no account to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deploy.records import Canary

_RAMPING = Canary(
    canary_id="c1",
    model="m",
    candidate="m--v2",
    champion="m--v1",
    phase="ramping",
    paused=False,
    reason=None,
    step=0,
    steps=(5_000,),
    salt="s",
    created_at=0.0,
    step_started_at=0.0,
    stopped_s=0.0,
    stopped_at=None,
    ended_at=None,
    generation=1,
)


def made_canary(**changes: Any) -> Canary:
    """Return a canary in the first step of its ramp, with these fields changed."""
    return replace(_RAMPING, **changes)
