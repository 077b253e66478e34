"""How often a run that is killed or stopped is resumed. Pure.

A run that was killed by chance (a restart of the machine, memory that somebody else took) dies
elsewhere the next time. One that dies where it died before would die there for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

DEATHS_AT_ONE_PLACE = 3
"""A run that died this often in the same group, without a checkpoint between, is not resumed."""
DEATHS_AT_ONE_CHECKPOINT = 10
"""... and neither is one that died this often in any place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One time that a run was killed."""

    at: float
    """When it was found dead, in Unix seconds."""
    checkpoint: int
    """Number of its newest checkpoint; 0: it had none."""
    step: int
    """Optimiser steps that were done in it,"""
    steps: int
    """of so many; 0: it had not begun."""
    place: str | None
    """The group that it computed; "": none; None: its trainer did not say."""
    stopped: bool = False
    """It was asked to stop, and did. That is no death, and counts towards no limit."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def why_not_again(deaths: Sequence[Mapping[str, Any]]) -> str | None:
    """Say why a run is not resumed after the last of these deaths; None: it is.

    deaths: JSON of `Death`, the oldest first.
    """
    last = deaths[-1]
    if last.get("stopped"):
        return None
    here = [
        one
        for one in deaths
        if one.get("checkpoint") == last.get("checkpoint") and not one.get("stopped")
    ]
    same = sum(one.get("place") == last.get("place") for one in here)
    if same >= DEATHS_AT_ONE_PLACE:
        return f"it died {same} times {_at(last.get('place'))}"
    if len(here) >= DEATHS_AT_ONE_CHECKPOINT:
        return f"it died {len(here)} times without another step"
    return None


def _at(place: object) -> str:
    if place is None:
        return "before it was done with a step"
    return f"while it computed group {place}" if place else "while it loaded, stepped or saved"


def resumed_words(deaths: object) -> str:
    """Say where a run was resumed; "" when it never was. deaths: JSON of the store."""
    if not isinstance(deaths, list) or not deaths or not isinstance(deaths[-1], dict):
        return ""
    step, steps = deaths[-1].get("step"), deaths[-1].get("steps")
    at = f"from step {step} of {steps}" if step else "before its first step"
    stops = sum(bool(one.get("stopped")) for one in deaths if isinstance(one, dict))
    kills = len(deaths) - stops
    counts = [
        f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((kills, "kill"), (stops, "stop")) if n
    ]
    again = f", after {' and '.join(counts)}" if len(deaths) > 1 else ""
    return f"resumed {at}{again}"


def was_stopped(deaths: object) -> bool:
    """Return True when a run was resumed last after it had been asked to stop."""
    return (
        isinstance(deaths, list)
        and bool(deaths)
        and isinstance(deaths[-1], dict)
        and bool(deaths[-1].get("stopped"))
    )
