"""A clock that tests move."""

from __future__ import annotations


class Clock:
    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now
        """Seconds since 1970."""

    def __call__(self) -> float:
        return self.now
