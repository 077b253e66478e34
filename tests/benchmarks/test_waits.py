"""Percentiles of users' waits and how two arms compare: worked by hand."""

from __future__ import annotations

import pytest

from benchmarks.ruler.run import ttft_target
from benchmarks.ruler.users.ttft import OFF, ON, _over_off
from benchmarks.ruler.users.waits import percentile, ratio


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)]
)
def test_a_percentile_is_the_least_wait_that_the_share_does_not_exceed(
    share: float, expected: float
) -> None:
    waits = [float(number) for number in range(100, 0, -1)]

    assert percentile(waits, share) == expected


def test_equal_arms_have_the_ratio_1_and_slower_ones_their_factor() -> None:
    slices = [[1.0, 2.0, 3.0]] * 10

    same = ratio(slices, slices, 0.99)
    twice = ratio([[2 * wait for wait in one] for one in slices], slices, 0.99)

    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    assert (twice.value, twice.low, twice.high) == (2.0, 2.0, 2.0)


def test_an_arm_is_compared_with_the_one_without_sampling() -> None:
    slices = {OFF: [[1.0, 2.0]] * 3, ON: [[3.0, 3.0]] * 3}

    assert _over_off(OFF, slices) == {}
    assert _over_off(ON, slices) == {
        "p50_over_off": 3.0,
        "p50_interval": "[3.000, 3.000]",
        "p99_over_off": 1.5,
        "p99_interval": "[1.500, 1.500]",
    }


@pytest.mark.parametrize(
    ("over", "requests", "holds"), [(1.05, 1_000, True), (1.06, 1_000, False), (0.5, 999, False)]
)
def test_the_target_needs_a_small_ratio_of_enough_requests(
    over: float, requests: int, holds: bool
) -> None:
    rows = [
        {"sampling": OFF, "requests": 1_000},
        {"sampling": ON, "requests": requests, "p99_over_off": over, "p99_interval": "[0, 2]"},
        {"sampling": "on, x", "requests": 1, "p99_over_off": 9.0, "p99_interval": "[0, 20]"},
    ]

    target = ttft_target(rows)

    assert target.holds is holds
    assert target.value == (None if requests < 1_000 else over)
