"""Advantages and the spread of a group's scores."""

from __future__ import annotations

import pytest

from learner.errors import GroupTooSmallError
from learner.grpo.advantages import center_rewards, spread


def test_an_advantage_is_the_reward_minus_the_group_mean() -> None:
    # mean = (0.9 + 0.4 + 0.4 + 0.1) / 4 = 0.45
    assert center_rewards([0.9, 0.4, 0.4, 0.1]) == pytest.approx([0.45, -0.05, -0.05, -0.35])


def test_one_group_gives_no_net_push() -> None:
    assert center_rewards([1.0, 0.0, 0.5, 0.5]) == [0.5, -0.5, 0.0, 0.0]


def test_equal_rewards_give_no_push_at_all() -> None:
    assert center_rewards([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]


def test_the_spread_is_the_population_standard_deviation() -> None:
    # mean 0.5, squares 0.25 + 0.25 + 0 + 0 = 0.5, over 4 = 0.125, root = 0.353553
    assert spread([1.0, 0.0, 0.5, 0.5]) == pytest.approx(0.353553, abs=1e-6)


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_fewer_than_two_answers_are_no_group(rewards: list[float]) -> None:
    with pytest.raises(GroupTooSmallError, match=f"got {len(rewards)}"):
        center_rewards(rewards)
    with pytest.raises(GroupTooSmallError):
        spread(rewards)
