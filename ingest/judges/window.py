"""How much goes out in a minute, and when more may. Pure: no clock.

A booking counts from the moment when it is made, and for a minute after its request went out. So
no minute, wherever it begins, has requests of more than the limit: whatever went out in it was out
or booked already when the last of them was booked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MINUTE_S = 60.0


@dataclass(eq=False, slots=True)
class Booking:
    """The units of one request; changed by its `Window` alone."""

    units: float
    out_at: float | None = None
    """When the request went out; None: not yet."""
    counts: bool = field(default=True)
    """Within the minute that its window looks at."""


class Window:
    """So many units in any minute."""

    def __init__(self, per_minute: int) -> None:
        """per_minute: 1 or more."""
        self.per_minute = per_minute
        self._pending: dict[int, Booking] = {}
        self._out: deque[Booking] = deque()
        """In the order in which they went out."""
        self._used = 0.0

    def counted(self, units: float) -> float:
        """Return what a request counts for: one beyond the whole limit goes out alone, since the
        provider alone can say whether it takes it."""
        return min(units, float(self.per_minute))

    def book(self, units: float, now: float) -> Booking:
        """Count a request that is about to go out, also where it does not fit."""
        self._expire(now)
        made = Booking(units=self.counted(units))
        self._pending[id(made)] = made
        self._used += made.units
        return made

    def sent(self, booking: Booking, now: float) -> None:
        """Note that a booked request goes out now."""
        if self._pending.pop(id(booking), None) is not None:
            booking.out_at = now
            self._out.append(booking)

    def correct(self, booking: Booking, units: float, now: float) -> None:
        """Replace what was booked by what was used."""
        self._expire(now)
        if booking.counts:
            found = self.counted(units)
            self._used += found - booking.units
            booking.units = found

    def cancel(self, booking: Booking) -> None:
        """Take a booking back whose request never went out."""
        if self._pending.pop(id(booking), None) is not None:
            booking.counts = False
            self._used -= booking.units

    def held(self, now: float) -> deque[tuple[float, float]]:
        """Return (when it ends to count, units) of what counts now, the first to end first."""
        self._expire(now)
        out = [(one.out_at + MINUTE_S, one.units) for one in self._out if one.out_at is not None]
        return deque([*out, *((now + MINUTE_S, one.units) for one in self._pending.values())])

    def _expire(self, now: float) -> None:
        while self._out and (self._out[0].out_at or 0.0) + MINUTE_S <= now:
            gone = self._out.popleft()
            gone.counts = False
            self._used -= gone.units
        if not self._out and not self._pending:
            self._used = 0.0  # no rounding error stays


def free_in_s(windows: Sequence[Window], needs: Sequence[Sequence[float]], now: float) -> float:
    """Return the seconds until the last of some requests may go out, in their order.

    needs: of each request its units in each of the windows.
    """
    if not windows or not needs:
        return 0.0
    held = [window.held(now) for window in windows]
    used = [sum(units for _, units in one) for one in held]
    at = now
    for need in needs:
        counted = [window.counted(units) for window, units in zip(windows, need, strict=True)]
        for place, window in enumerate(windows):
            while held[place] and used[place] + counted[place] > window.per_minute:
                ends, units = held[place].popleft()
                used[place] -= units
                at = max(at, ends)
        for place, units in enumerate(counted):
            held[place].append((at + MINUTE_S, units))
            used[place] += units
    return at - now
