"""Users' turns of a ramp in an order that neither arm's speed decides. Pure.

The next conversation that begins is the canary's with the probability of its weight; the next
request that ends is more often that of the faster arm. So each turn waits `wait_s` from its
beginning, until those that began before it have ended. One that takes longer counts when it ends,
and is counted as late: left out, an adapter that hangs would show nothing.

Nor may the later requests of a conversation count when they begin: an agent that does not pause
sends its fifth one sooner, the sooner it got four replies. So each earlier reply of a unit counts
as if it had taken the time of a long one (`LongReplies`), and the request waits for the difference.

The order follows from the turns alone, so whoever reads them again ends in the same state.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from deploy.evidence.live import MOST_UNITS, Turn

MOST_HELD = 100_000
"""Turns that wait for earlier ones; beyond it the oldest wait no longer, and count as late."""
COMMIT_S = 5.0
"""Longest time from the end of a turn to when it can be read, in seconds; part of the wait."""
LONGEST_LAG_S = 3_600.0
"""Longest wait of a request for what earlier replies of its unit took too little. A unit of
hundreds of requests, as a popular opening is one, is so long behind at most."""
LONG_SHARE = 0.05
"""Share of the replies that take longer than a long one."""
_GROWTH = 1.25
"""Reply times are counted in classes, each so many times as long as the one before."""
_LOG_GROWTH = math.log(_GROWTH)
_SHORTEST_S = 0.1
_UNSEEN = 5
"""Replies as long as the whole wait that each arm begins with: nothing is known of it yet. With
`LONG_SHARE` the first hundred replies of an arm are taken for long ones."""


class LongReplies:
    """What is a long reply: the slower arm's quantile, from the replies so far."""

    def __init__(self, most_s: float) -> None:
        """most_s: the longest that it may be, seconds."""
        self._most_s = most_s
        self._counts = {arm: Counter({_class_of(most_s): _UNSEEN}) for arm in (True, False)}
        """By arm (True: the canary's), replies in each class of times."""
        self._long_s = dict.fromkeys(self._counts, most_s)

    @property
    def long_s(self) -> float:
        """Time within which all but `LONG_SHARE` of the replies of either arm ended, seconds."""
        return max(self._long_s.values())

    def add(self, took_s: float, *, canary: bool) -> None:
        """Count a reply."""
        counts = self._counts[canary]
        counts[_class_of(min(took_s, self._most_s))] += 1
        left = LONG_SHARE * counts.total()
        for one in sorted(counts, reverse=True):
            left -= counts[one]
            if left < 0.0:
                self._long_s[canary] = min(self._most_s, _GROWTH**one)
                return


class InOrder:
    """Holds the turns that wait."""

    def __init__(self, wait_s: float) -> None:
        """wait_s: seconds from the beginning of a request to when it counts."""
        self._wait_s = wait_s
        self._grace_s = max(0.0, wait_s - COMMIT_S)
        self._held: list[tuple[float, float, int, Turn]] = []
        """When they count, when they began, their place in the table; a heap."""
        self._long = LongReplies(wait_s)
        self._units: dict[int, tuple[int, float, float]] = {}
        """Hash of a unit -> its replies one after the other, their seconds, and when the last one
        ended."""

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
        late = stored_at - started_at > max(self._grace_s, COMMIT_S)
        at = counts_at(started_at, stored_at, self._grace_s)
        at += self._lag_s(turn, started_at, took_s)
        turn = replace(turn, late=True) if late else turn
        heapq.heappush(self._held, (at, started_at, place, turn))

    def take(self, now: float) -> Iterator[Turn]:
        """Yield the turns that have waited long enough, in their order. now: Unix seconds; every
        turn that was stored until then has been added."""
        while self._held and self._held[0][0] <= now - self._wait_s:
            yield heapq.heappop(self._held)[-1]
        while len(self._held) > MOST_HELD:
            yield replace(heapq.heappop(self._held)[-1], late=True)

    def _lag_s(self, turn: Turn, started_at: float, took_s: float) -> float:
        """Return how much later the request would have begun after long replies; note its own."""
        unit = hash(turn.unit)
        replies, total_s, ended_at = self._units.get(unit, (0, 0.0, -math.inf))
        lag_s = replies * self._long.long_s - total_s
        # Of requests at the same time only one is on the way to the next.
        if started_at >= ended_at and (replies or len(self._units) < MOST_UNITS):
            self._units[unit] = (replies + 1, total_s + took_s, started_at + took_s)
        self._long.add(took_s, canary=turn.canary)
        return min(max(0.0, lag_s), LONGEST_LAG_S)


def counts_at(started_at: float, stored_at: float, grace_s: float) -> float:
    """Return the time by which a turn has its place among the others, Unix seconds.

    It is its beginning; for one that was stored later than `grace_s` after that, `grace_s` before
    it was stored. Nor is it later than `grace_s` after it was stored, if a proxy's clock is ahead.
    """
    return min(max(started_at, stored_at - grace_s), stored_at + grace_s)


def _class_of(took_s: float) -> int:
    return math.ceil(math.log(max(took_s, _SHORTEST_S)) / _LOG_GROWTH)
