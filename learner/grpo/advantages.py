"""Advantages: how much better an answer is than its siblings. Pure.

There is no division by the group's standard deviation: it would amplify the judge's noise in flat
groups to full-size gradients. Flat groups are left out by a limit on the spread of their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, pstdev

from learner.errors import GroupTooSmallError

MIN_TRAINABLE = 2
"""Least trainable answers of a group: one alone has no sibling in the gradient to compare with."""


def center_rewards(rewards_G: Sequence[float]) -> list[float]:
    """Score each answer against its siblings: reward minus the group mean.

    rewards_G: [G] judge scores, unitless 0..1, one per answer, G >= 2.
    Returns: [G] advantages, same unit and order; they sum to 0.
    Raises: GroupTooSmallError when G < 2.
    Source: Dr. GRPO, arXiv:2503.20783 (no division by the group's std).
    """
    _need_two(rewards_G)
    group_mean = mean(rewards_G)  # exact, so that equal rewards give exactly 0
    return [reward - group_mean for reward in rewards_G]


def spread(rewards_G: Sequence[float]) -> float:
    """Population standard deviation of a group's scores, in score units.

    The range would grow with G; the standard deviation does not.
    Raises: GroupTooSmallError when G < 2.
    """
    _need_two(rewards_G)
    return pstdev(rewards_G)


def _need_two(rewards_G: Sequence[float]) -> None:
    if len(rewards_G) < 2:
        raise GroupTooSmallError(f"need at least 2 rewards, got {len(rewards_G)}")
