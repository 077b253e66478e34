"""Read `learner.cron` as cron does (crontab(5) of Vixie's cron), in the zone of `learner.timezone`.

Five fields, each a list of numbers, names, ranges and steps; weekdays 0 and 7 are Sunday. Where day
of month and weekday are both given, either is enough; a field that begins with `*` is not given.

A change of the clock: a line whose minute or hour begins with `*` goes by the clock, so its times
do not come in the hour that is left out, and come twice in the hour that is repeated. The times of
any other line come once: one that is left out comes as much later as the clock jumps, and of one
that is repeated the first counts. (APScheduler's own trigger counts Monday as 0, asks for both
days, and goes back in time at the end of summer time.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import islice
from zoneinfo import ZoneInfo

from apscheduler.triggers.base import BaseTrigger

from sidecar.errors import SettingsError
from sidecar.settings import Learner

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
SUNDAY = 7
"""The weekday 7, which is 0 too."""
NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
FARTHEST_DAYS = 41 * 366
"""A 29 February that is a given weekday comes within 40 years."""
_PART = re.compile(r"(?:\*|(\w+)(?:-(\w+))?)(?:/(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class _Field:
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    """Of the numbers from `low` on."""

    def read(self, text: str) -> frozenset[int]:
        """Raises: ValueError."""
        return frozenset(number for part in text.split(",") for number in self._part(part))

    def _part(self, part: str) -> range:
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{self.name} {part!r} is no number, name, range or step")
        first, last, step = match.groups()
        low = self.low if first is None else self._number(first)
        high = self.high if first is None or (step and last is None) else low
        if last is not None:
            high = self._number(last)
            if low > high == 0 and self.high == SUNDAY:  # "fri-sun"
                high = SUNDAY
        if low > high:
            raise ValueError(f"{self.name} {part!r} goes backwards; give two ranges")
        if step is not None and int(step) == 0:
            raise ValueError(f"{self.name} {part!r} has a step of 0")
        return range(low, high + 1, int(step or 1))

    def _number(self, text: str) -> int:
        if text.lower() in self.names:
            return self.low + self.names.index(text.lower())
        if not text.isdecimal():
            raise ValueError(f"{self.name} {text!r} is no number and no name")
        if not self.low <= int(text) <= self.high:
            raise ValueError(f"{self.name} {text} is not in {self.low} to {self.high}")
        return int(text)


FIELDS = (
    _Field(name="minute", low=0, high=59),
    _Field(name="hour", low=0, high=23),
    _Field(name="day", low=1, high=31),
    _Field(name="month", low=1, high=12, names=tuple(MONTHS)),
    _Field(name="weekday", low=0, high=SUNDAY, names=tuple(WEEKDAYS)),
)


class Cron(BaseTrigger):  # type: ignore[misc]  # apscheduler is not typed
    """The times of a line of cron."""

    def __init__(self, line: str, zone: tzinfo = UTC) -> None:
        """Raises: ValueError."""
        self.zone = zone
        fields = NICKNAMES.get(line.strip().lower(), line).split()
        if len(fields) != len(FIELDS):
            raise ValueError(f"has {len(fields)} fields instead of 5")
        numbers = [field.read(text) for field, text in zip(FIELDS, fields, strict=True)]
        self._minutes, self._hours, self._days, self._months, weekdays = numbers
        self._weekdays = {number % 7 for number in weekdays}
        stars = [text.startswith("*") for text in fields]
        self._by_clock = stars[0] or stars[1]
        self._either_day = not (stars[2] or stars[4])

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        """Return the first time from `now` on and after `previous`, in UTC; None when none comes
        within 40 years."""
        at = now.astimezone(UTC)
        if previous is not None:
            at = max(at, previous.astimezone(UTC) + timedelta(seconds=1))
        day = (at - timedelta(days=1)).astimezone(self.zone).date()
        for _ in range(FARTHEST_DAYS):
            if self._is_given(day):
                found = min((one for one in self._times_of(day) if one >= at), default=None)
                if found is not None:
                    return found
            if day == date.max:
                return None
            day += timedelta(days=1)
        return None

    def _is_given(self, day: date) -> bool:
        if day.month not in self._months:
            return False
        of_month, of_week = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        return of_month or of_week if self._either_day else of_month and of_week

    def _times_of(self, day: date) -> Iterator[datetime]:
        for hour in self._hours:
            for minute in self._minutes:
                wall = datetime(day.year, day.month, day.day, hour, minute, tzinfo=self.zone)
                first = wall.astimezone(UTC)
                if not self._by_clock:
                    yield first
                    continue
                for at in (first, wall.replace(fold=1).astimezone(UTC)):
                    if at.astimezone(self.zone).replace(fold=0) == wall:
                        yield at


def read_cron(learner: Learner) -> Cron:
    """Read `learner.cron`. Raises: SettingsError, also for a day that never comes."""
    zone = UTC if learner.timezone == "UTC" else ZoneInfo(learner.timezone)
    try:
        trigger = Cron(learner.cron, zone)
    except ValueError as error:
        raise SettingsError(
            f"setting learner.cron: {error}; give five fields: minute, hour, day, month, weekday"
        ) from error
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise SettingsError(
            "setting learner.cron: names a day that never comes, so no run would ever start; "
            "correct day and month"
        )
    return trigger


def next_times(learner: Learner, now: datetime, count: int = 3) -> list[datetime]:
    """Return the next times of `learner.cron`, in its zone. Raises: SettingsError."""
    trigger = read_cron(learner)

    def times() -> Iterator[datetime]:
        at = trigger.get_next_fire_time(None, now)
        while at is not None:
            yield at.astimezone(trigger.zone)
            at = trigger.get_next_fire_time(at, at)

    return list(islice(times(), count))
