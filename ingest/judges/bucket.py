"""A token bucket: how long to wait so that no minute has more than its limit. Pure: no clock.

A taker takes at once and is told how long to wait: those that come later wait behind it, in order,
and nobody has to ask again.
"""

from __future__ import annotations

BURST_SHARE = 0.1
"""Share of a minute's limit that may go at once after a quiet time. With it the bucket is refilled
by the rest a minute, so that no minute, wherever it begins, has more than the limit."""
LARGEST_SHARE = 0.5
"""Most of a minute's limit that one taker counts for beforehand: a larger one would wait for a
minute and more, and the provider alone can say whether it takes such a request."""
MINUTE_S = 60.0


class Bucket:
    """So many units a minute; a limit of 10 or less is one of whole units, such as calls."""

    def __init__(self, per_minute: int, *, now: float) -> None:
        """per_minute: 1 or more. now: seconds on the clock that `take` uses."""
        self._largest = max(1.0, LARGEST_SHARE * per_minute)
        self._burst = max(1.0, BURST_SHARE * per_minute)
        # A bucket of one unit is empty when a minute begins with a taker, so all may come back.
        refill = per_minute - self._burst if self._burst > 1.0 else per_minute
        self._per_s = refill / MINUTE_S
        self._level = self._burst
        self._at = now

    def take(self, units: float, now: float, *, longest_s: float) -> float | None:
        """Take units. Returns: the seconds to wait; None, with nothing taken, beyond `longest_s`.

        longest_s: the longest wait that is worth it.
        """
        left = self._level_at(now) - min(units, self._largest)
        wait_s = max(0.0, -left / self._per_s)
        if wait_s > longest_s:
            return None
        self._level, self._at = left, now
        return wait_s

    def free_in_s(self, units: float, now: float) -> float:
        """Return how long `take` would have to wait."""
        return max(0.0, (min(units, self._largest) - self._level_at(now)) / self._per_s)

    def correct(self, *, taken: float, used: float, now: float) -> None:
        """Replace what was taken beforehand by what was used; later takers wait for the rest."""
        change = min(taken, self._largest) - used
        self._level, self._at = min(self._burst, self._level_at(now) + change), now

    def _level_at(self, now: float) -> float:
        return min(self._burst, self._level + max(0.0, now - self._at) * self._per_s)
