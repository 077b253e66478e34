"""The users' rate, by hand."""

from __future__ import annotations

from learner.schedule.rule import UserRate


def test_the_rate_is_unknown_until_the_window_is_seen() -> None:
    rate = UserRate(60.0)
    assert rate.per_minute is None

    rate.see(0.0, 100)
    rate.see(59.0, 110)
    assert rate.per_minute is None

    rate.see(60.0, 130)
    assert rate.per_minute == 30.0


def test_what_is_older_than_the_window_no_longer_counts() -> None:
    rate = UserRate(60.0)
    for at, total in ((0.0, 0), (30.0, 90), (60.0, 90), (90.0, 100)):
        rate.see(at, total)

    assert rate.per_minute == 10.0


def test_it_begins_anew_with_a_smaller_counter_and_an_earlier_time() -> None:
    rate = UserRate(60.0)
    rate.see(0.0, 50)
    rate.see(60.0, 40)
    assert rate.per_minute is None
    rate.see(120.0, 46)
    assert rate.per_minute == 6.0

    rate.see(100.0, 46)
    assert rate.per_minute is None
