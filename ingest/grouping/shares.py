"""Fair shares of the places for groups, by project, then key, then user. Pure.

A robot may send nine tenths of the traffic; what it asks would be nine tenths of what is learned.
So a project, a key of a project and a user of a key may each hold a fifth of the places, or more
where the others do not have enough to fill theirs (max-min fairness over the demand of a day).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

SHARE: Final = 0.2
"""Part of the places that one caller may hold whatever the others ask: with five callers who have
enough, each gets a fifth."""
DAY_S: Final = 86_400.0


class Caller(NamedTuple):
    """Who asked. What a client may invent, the user, counts within what it cannot, its key."""

    project: str
    key_id: str = ""
    user: str = ""


def daily_demand(
    asked: Iterable[tuple[Caller, float]], *, now: float, each: float = 1.0
) -> dict[Caller, float]:
    """Return the exchanges a day of each caller.

    asked: caller and time of recent exchanges. each: how many exchanges one of them stands for.
    """
    recent = [(caller, at) for caller, at in asked if now - DAY_S <= at <= now]
    if not recent:
        return {}
    seen_s = max(now - min(at for _, at in recent), 1.0)
    number = Counter(caller for caller, _ in recent)
    return {caller: found * each * DAY_S / seen_s for caller, found in number.items()}


def fill_level(demands: Iterable[float], places: float) -> float:
    """Return the level at which the demands, each cut there, fill the places; infinity when they
    do not. Source: max-min fairness by progressive filling."""
    rest, ordered = places, sorted(demands)
    for number, demand in enumerate(ordered):
        level = rest / (len(ordered) - number)
        if demand >= level:
            return level
        rest -= demand
    return float("inf")


class Shares:
    """Who holds how many places, while a batch is decided."""

    def __init__(
        self, places: int, held: Mapping[Caller, int], demand: Mapping[Caller, float]
    ) -> None:
        """held: places by caller. demand: exchanges a day; a caller without one adds nothing."""
        self._least = SHARE * places
        self._held: Counter[tuple[str, ...]] = Counter()
        for caller, number in held.items():
            self.take(caller, number)
        self._demand: dict[tuple[str, ...], dict[str, float]] = {}
        for caller, asked in demand.items():
            for depth in range(3):
                below = self._demand.setdefault(tuple(caller[:depth]), {})
                below[caller[depth]] = below.get(caller[depth], 0.0) + asked
        self._caps: dict[tuple[str, ...], float] = {(): float(places)}

    def has_room(self, caller: Caller) -> bool:
        """Tell whether one more place is within the shares, which are rounded up: rounded down,
        some places would stay empty."""
        return all(self._held[path] < self._cap(path) for path in _paths(caller))

    def take(self, caller: Caller, number: int = 1) -> None:
        for path in _paths(caller):
            self._held[path] += number

    def _cap(self, path: tuple[str, ...]) -> float:
        if path not in self._caps:
            beside = self._demand.get(path[:-1], {})
            level = fill_level(beside.values(), self._cap(path[:-1]))
            self._caps[path] = max(self._least, level)
        return self._caps[path]


def _paths(caller: Caller) -> list[tuple[str, ...]]:
    return [tuple(caller[:depth]) for depth in (1, 2, 3)]
