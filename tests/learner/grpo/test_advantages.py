"""Advantages and the spread of a group's scores."""

from __future__ import annotations

import pytest

from learner.errors import GroupTooSmallError
from learner.grpo.advantages import (
    ADVANTAGES,
    assign,
    center_rewards,
    leave_one_out,
    rank,
    spread,
    standardise,
)


def test_an_advantage_is_the_reward_minus_the_group_mean() -> None:
    # mean = (0.9 + 0.4 + 0.4 + 0.1) / 4 = 0.45
    assert center_rewards([0.9, 0.4, 0.4, 0.1]) == pytest.approx([0.45, -0.05, -0.05, -0.35])


def test_the_spread_is_the_population_standard_deviation() -> None:
    # mean 0.5, squares 0.25 + 0.25 + 0 + 0 = 0.5, over 4 = 0.125, root = 0.353553
    assert spread([1.0, 0.0, 0.5, 0.5]) == pytest.approx(0.353553, abs=1e-6)


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_fewer_than_two_answers_are_no_group(rewards: list[float]) -> None:
    with pytest.raises(GroupTooSmallError, match=f"got {len(rewards)}"):
        center_rewards(rewards)
    with pytest.raises(GroupTooSmallError):
        spread(rewards)


def test_leave_one_out_compares_with_the_others_alone() -> None:
    # 0.9 - (0.4 + 0.4 + 0.1) / 3 = 0.6
    assert leave_one_out([0.9, 0.4, 0.4, 0.1]) == pytest.approx([0.6, -0.2 / 3, -0.2 / 3, -1.4 / 3])


def test_std_is_the_published_grpo() -> None:
    # TRL 1.16 and verl 0.9 on these rewards, with the unbiased deviation and 1e-4
    assert standardise([0.9, 0.4, 0.4, 0.1]) == pytest.approx(
        [1.3564, -0.1507, -0.1507, -1.0550], abs=1e-4
    )
    assert standardise([0.7, 0.7]) == [0.0, 0.0]


def test_ranks_are_equally_far_apart_and_ties_share_theirs() -> None:
    assert rank([0.9, 0.41, 0.4, 0.1]) == pytest.approx([0.5, 1 / 6, -1 / 6, -0.5])
    assert rank([0.9, 0.4, 0.4, 0.1]) == pytest.approx([0.5, 0.0, 0.0, -0.5])
    assert rank([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", ADVANTAGES)
def test_the_baseline_is_of_the_answers_that_count(method: str) -> None:
    found = assign([0.95, *[0.5] * 7], [False, *[True] * 7], method)
    assert found == [0.0] * 8
    assert sum(assign([0.9, 0.2, 0.5], [True, True, False], method)) == pytest.approx(0.0)
