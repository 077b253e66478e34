"""When a run starts, and what it waits for."""

from __future__ import annotations

from typing import Any

import pytest

from learner.schedule.rule import Situation, decide, hold_s


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


def test_nothing_starts_before_its_time() -> None:
    assert decide(seen(due=False)).kind == "not_due"


def test_an_open_canary_is_waited_for_and_named() -> None:
    decision = decide(seen(canary="m--v3-abc", requested=True))

    assert decision.kind == "canary"
    assert "m--v3-abc" in decision.why
    assert not decision.spent


def test_a_request_goes_past_the_clock_the_hold_and_the_number_of_groups() -> None:
    assert decide(seen(requested=True, due=False, groups=0, hold_until=200.0)).kind == "start"


@pytest.mark.parametrize("requested", [False, True])
def test_a_pause_holds_everything(requested: bool) -> None:
    assert decide(seen(paused=True, requested=requested)).kind == "paused"


@pytest.mark.parametrize("requested", [False, True])
def test_there_are_never_two_runs(requested: bool) -> None:
    assert decide(seen(running=True, requested=requested)).kind == "running"


def test_after_a_failure_it_holds_back_for_a_while() -> None:
    assert decide(seen(hold_until=100.5)).kind == "held_back"
    assert decide(seen(hold_until=100.0)).kind == "start"


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
