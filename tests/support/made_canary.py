"""A canary for tests of pure rules: what a test does not name is of no account to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.canary.begun import begun_canary
from deploy.records import Canary

_RAMPING = replace(begun_canary(steps=(5_000,)), phase="ramping", salt="s")


def made_canary(**changes: Any) -> Canary:
    """Return a canary in the first step of its ramp, with these fields changed."""
    return replace(_RAMPING, **changes)
