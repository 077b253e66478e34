"""Users' turns in the order in which their requests began, from one in which replies ended. Pure.

The next request that begins is the canary's with the probability of its weight; the next that ends
is more often that of the faster arm. So each turn waits `wait_s` from its beginning, until those
that began before it have ended. One that takes longer counts when it ends, and is counted as late:
left out, an adapter that hangs would show nothing.

The order follows from the turns alone (`counts_at`), so whoever reads them again ends in the same
state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deploy.evidence.live import Turn

MOST_HELD = 50_000
"""Turns that wait for earlier ones; beyond it the oldest wait no longer, and count as late."""
COMMIT_S = 5.0
"""Longest time from the end of a turn to when it can be read, in seconds; part of the wait."""


class InOrder:
    """Holds the turns that wait."""

    def __init__(self, wait_s: float) -> None:
        """wait_s: seconds from the beginning of a request to when it counts."""
        self._wait_s = wait_s
        self._grace_s = max(0.0, wait_s - COMMIT_S)
        self._held: list[tuple[float, float, int, Turn]] = []
        """When they count, when they began, their place in the table."""

    def __len__(self) -> int:
        """Return the number of turns that wait."""
        return len(self._held)

    def add(self, turn: Turn, *, started_at: float, stored_at: float, place: int) -> None:
        """Take a turn that ended. Times are Unix seconds; place: its number, for equal times."""
        late = stored_at - started_at > max(self._grace_s, COMMIT_S)
        at = counts_at(started_at, stored_at, self._grace_s)
        self._held.append((at, started_at, place, replace(turn, late=late)))

    def take(self, now: float) -> Iterator[Turn]:
        """Yield the turns that have waited long enough, in their order. now: Unix seconds; every
        turn that was stored until then has been added."""
        held = sorted(self._held, key=lambda one: one[:3])
        due = sum(one[0] <= now - self._wait_s for one in held)
        too_many = max(due, len(held) - MOST_HELD)
        self._held = held[too_many:]
        yield from (turn for *_, turn in held[:due])
        yield from (replace(turn, late=True) for *_, turn in held[due:too_many])


def counts_at(started_at: float, stored_at: float, grace_s: float) -> float:
    """Return the time by which a turn has its place among the others, Unix seconds.

    It is its beginning; for one that was stored later than `grace_s` after that, `grace_s` before
    it was stored. Nor is it later than `grace_s` after it was stored, if a proxy's clock is ahead.
    """
    return min(max(started_at, stored_at - grace_s), stored_at + grace_s)
