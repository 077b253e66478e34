"""The simulated site of the tasks benchmark, by cases worked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.learner.art import FOLDER
from benchmarks.tasks import art
from benchmarks.tasks.world import (
    ACTIONS,
    SIZE,
    STEPS,
    Floats,
    Site,
    as_large,
    as_played,
    gradient,
    groups,
    leave_one_out,
    one_user,
    play,
    site,
    survivors,
)

FLAT = np.zeros((STEPS, ACTIONS))


def a_site(seed: int = 1) -> Site:
    return site(np.random.default_rng(seed))


def test_the_uniform_policy_gained_nothing_and_the_best_one_all() -> None:
    place = a_site()
    assert place.gained(FLAT) == 0.0
    best = np.where(place.effect == place.effect.max(axis=1, keepdims=True), 50.0, 0.0)
    assert place.gained(best) == pytest.approx(1.0)


def test_the_gradient_is_that_of_the_log_probability() -> None:
    taken, width = [(1, 0, 3, 2, 0, 1)], 1e-5

    def log_probability(logits: Floats) -> float:
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return float(np.log(chances[range(STEPS), taken[0]]).sum())

    at = np.random.default_rng(1).normal(size=FLAT.shape)
    found = gradient(at, taken, [0.5])
    for place in np.ndindex(FLAT.shape):
        moved = at.copy()
        moved[place] += width
        assert found[place] == pytest.approx(
            0.5 * (log_probability(moved) - log_probability(at)) / width, abs=1e-4
        )


def test_groups_are_of_told_sessions_and_hold_a_user_once() -> None:
    rng = np.random.default_rng(1)
    night = play(a_site(), FLAT, rng, 0)
    assert all(len(group) == SIZE for group in groups(as_played(night, rng)))
    for group in groups(survivors(night, rng)):
        assert all(one.outcomes for one, _ in group)
    for group in groups(one_user(night, rng)):
        assert sum(one.ready.caller == "user:one" for one, _ in group) <= 1


def test_steps_of_one_size_keep_their_directions() -> None:
    def doubled(rewards: Sequence[Sequence[float]]) -> list[float]:
        return [2 * one for group in rewards for one in group]

    found = as_large(doubled, leave_one_out)([(1.0, 0.0), (1.0, 1.0)])
    # Ours are 1, -1, 0 and 0: together 2. Theirs are 2, 0, 2 and 2: together 6.
    assert found == pytest.approx([2 / 3, 0.0, 2 / 3, 2 / 3])
    assert as_large(doubled, leave_one_out)([(0.0, 0.0)]) == [0.0, 0.0]


@pytest.mark.skipif(not (FOLDER / "art").is_dir(), reason="benchmarks/tasks/setup has not run")
def test_art_tells_its_own_advantages_in_our_order() -> None:
    found = art.load().advantages([(0.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0)])
    # Over the deviation: -1 and 3, over their mean size 1.5; the flat group is left out.
    assert found == pytest.approx([-2 / 3, -2 / 3, 2.0, -2 / 3, 0, 0, 0, 0], abs=1e-4)
