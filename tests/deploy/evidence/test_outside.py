"""What checks in a row mean: failure, error and no data are three things."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.evidence.live import (
    CHECKS_KEPT,
    Check,
    MetricState,
    Mode,
    Outcome,
    add_check,
    away,
    broken_guardrail,
    holding_signal,
    outcome_of,
    unseen,
)


def after(*outcomes: Outcome, mode: Mode = "guardrail") -> MetricState:
    """Three failures mean something, and two errors."""
    state = MetricState(mode=mode, max=0.1, fails_at=3, errs_at=2)
    for at, outcome in enumerate(outcomes):
        value = 0.5 if outcome == "failing" else None
        check = Check(at=float(at), outcome=outcome, value=value, why="it is down; start it")
        state = add_check(state, check)
    return state


def many(outcome: Outcome, times: int, mode: Mode = "guardrail") -> MetricState:
    state = after(mode=mode)
    for at in range(times):
        state = add_check(state, Check(at=float(at), outcome=outcome, why="it is down; start it"))
    return state


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (0.1, "ok"),
        (0.0, "ok"),
        (0.11, "failing"),
        (-0.1, "failing"),
        (float("inf"), "failing"),
        (float("nan"), "no_data"),
        (None, "no_data"),
    ],
)
def test_the_limits_themselves_are_good_and_nothing_is_no_failure(
    value: float | None, outcome: Outcome
) -> None:
    assert outcome_of(value, 0.0, 0.1) == outcome


def test_a_guardrail_breaks_at_its_third_failure_in_a_row_and_says_what_it_saw() -> None:
    assert broken_guardrail({"errors": after("failing", "failing")}) is None
    assert broken_guardrail({"errors": after("failing", "failing", "failing")}) == (
        "guardrail errors: 0.5, 0.5, 0.5 are above 0.1 in 3 checks in a row"
    )


def test_a_good_check_ends_a_row_and_neither_an_error_nor_no_data_does() -> None:
    good = after("failing", "failing", "ok", "failing")
    torn = after("failing", "no_data", "failing", "error", "failing")

    assert (good.failures, torn.failures) == (1, 3)
    assert broken_guardrail({"m": torn}) is not None


@pytest.mark.parametrize("outcome", ["error", "no_data"])
def test_a_provider_without_an_answer_never_rolls_back(outcome: Outcome) -> None:
    assert broken_guardrail({"m": many(outcome, 1_000)}) is None


def test_errors_hold_at_their_limit_and_say_what_to_do() -> None:
    assert away({"m": after("error")}) is None
    assert away({"m": after("error", "error")}) == (
        "m",
        "metric m gave no answer 2 times in a row: it is down; start it",
    )
    assert away({"m": after("error", "error", "no_data")}) is None


def test_a_signal_stands_until_it_recovers_and_rolls_nothing_back() -> None:
    failing = after("failing", "failing", "failing", mode="signal")

    assert holding_signal({"m": failing}) is not None
    assert broken_guardrail({"m": failing}) is None
    assert holding_signal({"m": add_check(failing, Check(at=9.0, outcome="ok", value=0.0))}) is None


def test_a_dry_run_gates_nothing() -> None:
    metrics = {
        "m": many("failing", 9, mode="dry_run"),
        "n": many("error", 9, mode="dry_run"),
    }

    assert (broken_guardrail(metrics), holding_signal(metrics), away(metrics)) == (None, None, None)


def test_a_failure_from_before_says_nothing_of_what_serves_now() -> None:
    old = {"m": after("failing", "failing", "failing")}

    assert broken_guardrail(old, since=2.0) is not None
    assert broken_guardrail(old, since=2.5) is None


def test_a_step_needs_a_value_of_its_own() -> None:
    state = after("ok", "no_data", "error")

    assert unseen({"m": state}, ["m"], since=0.0) is None
    assert unseen({"m": state}, ["m"], since=1.0) == "metric m, which has no value yet"
    assert unseen({}, ["m"], since=0.0) is not None


def test_the_newest_checks_are_kept() -> None:
    state = many("ok", CHECKS_KEPT + 5)

    assert (len(state.history), state.history[0].at) == (CHECKS_KEPT, 5.0)
    assert replace(state, history=()).last is None
