"""Times for people: dates and ages in text, raw numbers in JSON."""

from __future__ import annotations

import pytest

from deploy.text import is_time, iso, shown_time

AT = 1_772_357_400.0  # 2026-03-01T09:30:00Z


@pytest.mark.parametrize(
    ("later_s", "age"),
    [
        (0.4, "now"),
        (1, "1 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (3_599, "59 min ago"),
        (3_600, "1 h ago"),
        (2 * 86_400 - 1, "47 h ago"),
        (2 * 86_400, "2 days ago"),
        (-45, "in 45 s"),
        (-3 * 86_400, "in 3 days"),
    ],
)
def test_a_time_is_a_date_and_an_age(later_s: float, age: str) -> None:
    assert shown_time(AT, AT + later_s) == f"2026-03-01T09:30:00Z ({age})"


@pytest.mark.parametrize("at", [1e30, float("inf"), float("nan"), -1e18])
def test_a_number_outside_the_calendar_is_shown_as_it_is(at: float) -> None:
    assert shown_time(at, AT) == str(at)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (1_764_000_000.25, "2025-11-24T16:00:00.250Z"),
        (0, "1970-01-01T00:00:00.000Z"),
        (None, None),
        (True, None),
        ("yesterday", None),
        (1e300, None),
        (float("nan"), None),
    ],
)
def test_a_time_in_iso_8601(at: object, text: str | None) -> None:
    assert iso(at) == text


def test_only_numbers_in_fields_of_times_are_times() -> None:
    assert is_time("at", 1)
    assert is_time("created_at", 1.5)
    assert not is_time("revoked_at", None)
    assert not is_time("paused_at", True)
    assert not is_time("pass_at", 0.5), "a score"
    assert not is_time("step", 1)
    assert not is_time("format", 1)
