"""`learner.cron` against cron's own rules."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, strategies as st

from learner.schedule.rule import Cron, next_times, read_cron
from sidecar.errors import SettingsError
from sidecar.settings import Learner

MONDAY = datetime(2027, 1, 4, tzinfo=UTC)
RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def times(line: str, begin: datetime, end: datetime, zone: str = "UTC") -> list[datetime]:
    """The times of a line from `begin` on and before `end`."""
    cron, found = Cron(line, ZoneInfo(zone) if zone != "UTC" else UTC), []
    at = cron.after(begin - timedelta(microseconds=1))
    while at is not None and at < end:
        found.append(at)
        at = cron.after(at)
    return found


@pytest.mark.parametrize(
    ("line", "days"),
    [
        ("0 3 * * 1-5", "Mon Tue Wed Thu Fri"),
        ("0 3 * * 0", "Sun"),
        ("0 3 * * 7", "Sun"),
        ("0 3 * * mon", "Mon"),
        ("0 3 * * Fri-SUN", "Fri Sat Sun"),
        ("0 3 * * 5-7", "Fri Sat Sun"),
        ("0 3 * * */3", "Wed Sat Sun"),  # 0, 3, 6
        ("0 3 6 * 1", "Mon Wed"),  # either
        ("0 3 */3 * 1", "Mon"),  # both: the days of the month begin with `*`
        ("0 3 * feb 1", ""),
        ("@weekly", "Sun"),
    ],
)
def test_the_days_of_a_line_are_those_of_cron(line: str, days: str) -> None:
    found = times(line, MONDAY, MONDAY + timedelta(days=7))

    assert " ".join(f"{at:%a}" for at in found) == days


def _part(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    spans = st.tuples(number, number).map(sorted).map(lambda pair: f"{pair[0]}-{pair[1]}")
    steps = st.integers(1, high)
    return st.one_of(
        st.just("*"),
        number.map(str),
        spans,
        st.tuples(st.one_of(st.just("*"), spans), steps).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    )


def _field(low: int, high: int) -> st.SearchStrategy[str]:
    parts = st.lists(_part(low, high), min_size=1, max_size=3)
    return st.one_of(st.just("*"), parts.map(",".join))


def numbers_by_hand(text: str, low: int, high: int) -> set[int]:
    """The bits that Vixie's cron sets for a field of digits."""
    found = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = (f"{low}-{high}" if span == "*" else span).partition("-")
        found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return found


def rule_by_hand(line: str) -> Callable[[datetime], bool]:
    """Whether Vixie's cron would start a job in this minute."""
    fields = line.split()
    bits = [numbers_by_hand(one, *limits) for one, limits in zip(fields, RANGES, strict=True)]
    both = fields[2].startswith("*") or fields[4].startswith("*")
    weekdays = {7 if number == 0 else number for number in bits[4]}

    def is_time(at: datetime) -> bool:
        of_month, of_week = at.day in bits[2], at.isoweekday() in weekdays
        day = (of_month and of_week) if both else (of_month or of_week)
        return at.minute in bits[0] and at.hour in bits[1] and at.month in bits[3] and day

    return is_time


@given(
    line=st.tuples(*(_field(*limits) for limits in RANGES)).map(" ".join),
    begin=st.datetimes(datetime(2026, 1, 1), datetime(2029, 1, 1)),
)
@example(line="0 0 29 2 1", begin=datetime(2028, 2, 28))
def test_the_first_time_is_the_first_minute_that_cron_would_take(
    line: str, begin: datetime
) -> None:
    begin = begin.replace(tzinfo=UTC)
    minute = begin.replace(second=0, microsecond=0)
    is_time = rule_by_hand(line)
    minutes = (minute + timedelta(minutes=n) for n in range(3 * 1_440))
    by_hand = next((at for at in minutes if at >= begin and is_time(at)), None)

    found = Cron(line).after(begin - timedelta(microseconds=1))

    if by_hand is not None:
        assert found == by_hand
    else:
        assert found is None or found >= minute + timedelta(days=3)


@pytest.mark.parametrize(
    ("line", "night", "walls"),
    [  # Berlin: 02:00 to 03:00 is left out on 28 March 2027, and repeated on 31 October
        ("30 2 * * *", (3, 28), "03:30"),
        ("0 3 * * *", (3, 28), "03:00"),
        ("30 2,3 * * *", (3, 28), "03:30"),
        ("30 * * * *", (3, 28), "00:30 01:30 03:30 04:30"),
        ("30 2 * * *", (10, 31), "02:30"),
        ("30 * * * *", (10, 31), "00:30 01:30 02:30 02:30 03:30 04:30"),
        ("0 3 * * *", (10, 31), "03:00"),
    ],
)
def test_a_time_comes_once_when_the_clock_is_changed_and_hourly_ones_go_by_it(
    line: str, night: tuple[int, int], walls: str
) -> None:
    zone = ZoneInfo("Europe/Berlin")
    begin = datetime(2027, *night, tzinfo=zone)

    found = times(line, begin, datetime(2027, *night, 5, tzinfo=zone), "Europe/Berlin")

    assert found == sorted(found)
    assert " ".join(f"{at.astimezone(zone):%H:%M}" for at in found) == walls


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("0 3 * *", "has 4 fields instead of 5"),
        ("@reboot", "has 1 fields instead of 5"),
        ("61 3 * * *", "minute 61 is not in 0 to 59"),
        ("0 3 * * 5-1", "weekday '5-1' goes backwards; give two ranges"),
        ("*/0 3 * * *", "minute '*/0' has a step of 0"),
        ("0 3 * * nosuchday", "weekday 'nosuchday' is no number and no name"),
        ("0 3 ? * 1", "day '?' is no number, name, range or step"),
        ("0 3 ²  * *", "day '²' is no number, name, range or step"),
        ("0 0 31 2 *", "names a day that never comes"),
    ],
)
def test_a_line_that_is_none_of_crons_is_refused_with_its_field(line: str, why: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_cron(Learner(cron=line))

    assert str(refused.value).startswith("setting learner.cron: ")
    assert why in str(refused.value)


def test_the_next_times_are_those_of_the_zone() -> None:
    rules = Learner(cron="0 3 * * 1-5", timezone="America/New_York")

    found = next_times(rules, datetime(2027, 1, 8, 7, 59, 30, tzinfo=UTC))  # a Friday, 02:59:30

    assert [f"{at:%a %H:%M %z}" for at in found] == [
        "Fri 03:00 -0500",
        "Mon 03:00 -0500",
        "Tue 03:00 -0500",
    ]


def test_a_29_february_that_is_a_sunday_is_found() -> None:
    """`*/8` leaves weekday 0 alone, and begins with `*`: both days are asked for."""
    found = times("0 0 29 2 */8", MONDAY, datetime(2070, 1, 1, tzinfo=UTC))

    assert [at.year for at in found] == [2032, 2060]


def test_a_zone_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="is no time zone that this machine knows"):
        Learner(timezone="Europe/Atlantis")
    with pytest.raises(ValueError, match="is no time zone that this machine knows"):
        Learner(timezone="Europe")
