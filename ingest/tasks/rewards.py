"""The reward of a session from what clients told of how it ended. Pure.

A session that nobody told of has no reward: it is in no group of outcomes, and never counts as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ENDS: Final = (0.05, 0.95)
"""Quantiles of a project's values that become 0 and 1, where they are not in 0..1 already: one
wrong value among twenty moves no other reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One outcome of a session."""

    voice: str
    """Whose opinion it is (`ingest.feedback.store.voice`)."""
    received_at: float
    value: float | None = None
    success: bool | None = None
    done: bool = False

    @property
    def tells(self) -> bool:
        return self.value is not None or self.success is not None

    @property
    def ends(self) -> bool:
        return self.done or self.tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The values of a project that become 0 and 1."""

    low: float = 0.0
    high: float = 1.0

    def reward(self, value: float) -> float:
        if self.high <= self.low:
            return 0.5
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def scale_of(values: Sequence[float]) -> Scale:
    """Return the scale of a project. values: the newest ones, in any unit.

    Values in 0..1, but for a twentieth at each end, are rewards as they are.
    """
    order = sorted(values)
    if not order:
        return Scale()
    low, high = (order[round(end * (len(order) - 1))] for end in ENDS)
    return Scale() if low >= 0.0 and high <= 1.0 else Scale(low=low, high=high)


def reward_of(outcomes: Sequence[Outcome], scale: Scale) -> float | None:
    """Return the reward of a session, 0..1; None when nobody told how it ended.

    Of one voice the newest counts, and voices are averaged: who tells often has one vote. Where an
    outcome has a value and a success, the value says more.
    """
    newest: dict[str, Outcome] = {}
    for one in sorted(outcomes, key=lambda one: one.received_at):
        if one.tells:
            newest[one.voice] = one
    rewards = [
        scale.reward(one.value) if one.value is not None else float(bool(one.success))
        for one in newest.values()
    ]
    return sum(rewards) / len(rewards) if rewards else None
