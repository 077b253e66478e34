"""When a run starts, and what it waits for."""

from __future__ import annotations

from typing import Any

from learner.schedule.rule import Situation, UserRate, decide, hold_s


def seen(**changes: Any) -> Situation:
    values: dict[str, Any] = {
        "running": False,
        "paused": False,
        "requested": False,
        "due": True,
        "canary": None,
        "groups": 16,
        "min_groups": 16,
        "now": 100.0,
        "hold_until": 0.0,
        **changes,
    }
    return Situation(**values)


def test_enough_groups_start_a_run() -> None:
    assert decide(seen()).kind == "start"
    assert decide(seen(groups=15)).kind == "too_few_groups"
    assert decide(seen(groups=15)).why == "15 of 16 groups wait"


def test_one_group_waits() -> None:
    assert decide(seen(groups=1)).why == "1 of 16 groups waits"
    assert decide(seen(groups=1, min_groups=1)).why == "1 group waits"
    assert decide(seen(groups=2, min_groups=1)).why == "2 groups wait"


def test_a_request_goes_past_the_clock_the_hold_and_the_number_of_groups() -> None:
    assert decide(seen(requested=True, due=False, groups=0, hold_until=200.0)).kind == "start"


def test_a_turn_is_used_up_by_a_start_or_by_too_few_groups() -> None:
    assert decide(seen()).spent
    assert decide(seen(groups=0)).spent
    assert not decide(seen(paused=True)).spent
    assert not decide(seen(hold_until=200.0)).spent


def test_the_hold_doubles_up_to_an_hour() -> None:
    assert [hold_s(failures) for failures in (0, 1, 2, 3, 7, 8, 500)] == [
        0.0,
        30.0,
        60.0,
        120.0,
        1920.0,
        3600.0,
        3600.0,
    ]


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
