"""Users' turns of a ramp in an order that neither arm's speed decides. Pure.

The next conversation that begins is the canary's with the probability of its weight; the next
request that ends is more often that of the faster arm. So each turn waits `wait_s` from its
beginning, until those that began before it have ended. One that takes longer counts when it ends,
and is counted as late: left out, an adapter that hangs would show nothing.

Nor may the later requests of a conversation count when they begin: an agent sends its fifth one
sooner, the sooner it got four replies, and a person the sooner four answers were read. So each
earlier request of a unit counts as if the next one had come after a long time (`LongIntervals`),
and the request waits for the difference.

Time is that of the proxies' clocks: it goes on with the ends of the requests that were read. While
ingest stands still nothing counts, so what it stores afterwards is not taken for late; after
`QUIET_S` without a request nothing more is waited for.

The order follows from the turns alone, so whoever reads them again ends in the same state.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from deploy.evidence.live import MOST_UNITS, Turn

MOST_HELD = 100_000
"""Turns that wait for earlier ones; beyond it the oldest wait no longer, and count as late."""
COMMIT_S = 5.0
"""Longest time from the end of a turn to when it can be read, in seconds; part of the wait."""
QUIET_S = 600.0
"""Longest time without a new request for which turns wait, seconds. Longer than a restart of ingest
takes, and than the clocks of proxies and control differ."""
MOST_AHEAD_S = 3_600.0
"""A turn counts no later than this and the wait after it was stored: a proxy's clock may be days
ahead."""
LONGEST_LAG_S = 3_600.0
"""Longest wait of a request because earlier ones of its unit followed each other quickly. A unit of
hundreds of requests, as a popular opening is one, is so long behind at most."""
MOST_INTERVAL = 2.5
"""Longest interval between two requests that is made up for, as a multiple of the wait. Equal
adapters whose users pause 10 s beside 90 s were rolled back in 29 of 30 simulated ramps when only
the replies' time was (docs/log.md)."""
LONG_SHARE = 0.05
"""Share of the intervals that are longer than a long one."""
_GROWTH = 1.25
"""Intervals are counted in classes, each so many times as long as the one before."""
_LOG_GROWTH = math.log(_GROWTH)
_SHORTEST_S = 0.1
_UNSEEN = 5
"""Longest intervals that each arm begins with: nothing is known of it yet. With `LONG_SHARE` the
first hundred intervals of an arm are taken for long ones."""


class LongIntervals:
    """What is a long time from one request of a unit to the next: the slower arm's quantile."""

    def __init__(self, most_s: float) -> None:
        """most_s: the longest that it may be, seconds."""
        self._most_s = most_s
        self._counts = {arm: Counter({_class_of(most_s): _UNSEEN}) for arm in (True, False)}
        """By arm (True: the canary's), replies in each class of times."""
        self._long_s = dict.fromkeys(self._counts, most_s)

    @property
    def long_s(self) -> float:
        """Seconds after which all but `LONG_SHARE` of the next requests of either arm had come."""
        return max(self._long_s.values())

    def add(self, interval_s: float, *, canary: bool) -> None:
        """Count one."""
        counts = self._counts[canary]
        counts[_class_of(min(interval_s, self._most_s))] += 1
        left = LONG_SHARE * counts.total()
        for one in sorted(counts, reverse=True):
            left -= counts[one]
            if left < 0.0:
                self._long_s[canary] = min(self._most_s, _GROWTH**one)
                return


class _Unit(NamedTuple):
    requests: int
    """Those that came one after the other."""
    began_at: float
    newest_at: float
    """When the newest of them began,"""
    ends_at: float
    """and ended."""


class InOrder:
    """Holds the turns that wait."""

    def __init__(self, wait_s: float) -> None:
        """wait_s: seconds from the beginning of a request to when it counts."""
        self._wait_s = wait_s
        self._grace_s = max(0.0, wait_s - COMMIT_S)
        self._held: list[tuple[float, float, int, Turn]] = []
        """When they count, when they began, their place in the table; a heap."""
        self._newest_end = -math.inf
        """Newest end of a request that was read."""
        self._long = LongIntervals(MOST_INTERVAL * wait_s)
        self._units: OrderedDict[int, _Unit] = OrderedDict()
        """By the hash of a unit, the one that was met last at the end."""

    def __len__(self) -> int:
        """Return the number of turns that wait."""
        return len(self._held)

    def add(
        self, turn: Turn, *, started_at: float, stored_at: float, took_s: float, place: int
    ) -> None:
        """Take a turn that ended; those of one conversation in their order.

        Times are Unix seconds; took_s: seconds from the request to the end of its reply; place: its
        number, for equal times.
        """
        ended_at = min(started_at + took_s, stored_at)
        if stored_at < self._newest_end - QUIET_S:  # the clock was set back
            self._newest_end = ended_at
        self._newest_end = max(self._newest_end, ended_at)
        # Nothing later has been counted: what `take` gave out was this wait before the newest end.
        earliest = max(self._newest_end, stored_at - QUIET_S) - self._grace_s
        at = min(max(started_at, earliest), stored_at + MOST_AHEAD_S)
        if at - started_at > COMMIT_S:
            turn = replace(turn, late=True)
        at += self._lag_s(turn, started_at, took_s)
        heapq.heappush(self._held, (at, started_at, place, turn))

    def take(self, now: float) -> Iterator[Turn]:
        """Yield the turns that have waited long enough, in their order. now: Unix seconds; every
        turn that was stored until then has been added."""
        until = min(now, max(self._newest_end, now - QUIET_S)) - self._wait_s
        while self._held and self._held[0][0] <= until:
            yield heapq.heappop(self._held)[-1]
        while len(self._held) > MOST_HELD:
            yield replace(heapq.heappop(self._held)[-1], late=True)

    def _lag_s(self, turn: Turn, started_at: float, took_s: float) -> float:
        """Return how much later the request would have begun after long intervals; note it."""
        key = hash(turn.unit)
        ends_at = started_at + took_s
        unit = self._units.pop(key, None)
        if unit is None:
            self._units[key] = _Unit(1, started_at, started_at, ends_at)
            if len(self._units) > MOST_UNITS:
                self._units.popitem(last=False)
            return 0.0
        lag_s = unit.requests * self._long.long_s - (started_at - unit.began_at)
        # Of requests at the same time only one is on the way to the next.
        if started_at >= unit.ends_at:
            self._long.add(started_at - unit.newest_at, canary=turn.canary)
            unit = _Unit(unit.requests + 1, unit.began_at, started_at, ends_at)
        self._units[key] = unit
        return min(max(0.0, lag_s), LONGEST_LAG_S)


def _class_of(interval_s: float) -> int:
    return math.ceil(math.log(max(interval_s, _SHORTEST_S)) / _LOG_GROWTH)
