"""How long to wait before a process that ended is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

STEADY_S = 60.0
"""A process that lived this long is started again after the shortest wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """A wait that doubles from the first to the last."""

    first_s: float
    last_s: float

    def wait_s(self, previous_s: float | None, lived_s: float) -> float:
        """previous_s: the wait before its last start, None when this is its first end."""
        if previous_s is None or lived_s >= STEADY_S:
            return self.first_s
        return min(previous_s * 2, self.last_s)
