"""`learner.cron`: what the settings and docs/runbook.md say of its times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from learner.schedule.rule import Cron, next_times, read_cron
from sidecar.errors import SettingsError
from sidecar.settings import Learner

MONDAY = datetime(2027, 1, 4, tzinfo=UTC)


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


@pytest.mark.parametrize(
    ("line", "night", "walls"),
    [  # Berlin: 02:00 to 03:00 is left out on 28 March 2027, and repeated on 31 October
        ("30 2 * * *", (3, 28), "03:00"),
        ("0 3 * * *", (3, 28), "03:00"),
        ("30 2,3 * * *", (3, 28), "03:00 03:30"),
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
        ("61 3 * * *", "'61 3 * * *': Bad minute; give five fields"),
        ("0 3 * * 5-1", "Bad day-of-week"),
        ("*/0 3 * * *", "Bad minute"),
        ("0 3 * * nosuchday", "Bad day-of-week"),
        ("0 3 ? * 1", "Bad day-of-month"),
        ("0 3 ²  * *", "Bad day-of-month"),
        ("0 0 31 2 *", "Bad day-of-month"),
        ("0 0 */30 2 1#5", "names a day that never comes"),
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


def test_a_time_in_an_hour_that_is_repeated_lies_after_the_moment_asked_for() -> None:
    zone = ZoneInfo("Europe/Berlin")
    again = datetime(2027, 10, 31, 2, 15, fold=1, tzinfo=zone)

    found = Cron("30 2 * * *", zone).after(again)

    assert found == datetime(2027, 11, 1, 2, 30, tzinfo=zone)


def test_a_zone_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="is no time zone that this machine knows"):
        Learner(timezone="Europe/Atlantis")
    with pytest.raises(ValueError, match="is no time zone that this machine knows"):
        Learner(timezone="Europe")
