"""The simulated site of the tasks benchmark, by cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tasks.run import merged
from benchmarks.tasks.world import (
    ACTIONS,
    SIZE,
    STEPS,
    TRAPS,
    Floats,
    Site,
    as_played,
    gradient,
    groups,
    one_user,
    play,
    site,
    survivors,
)
from ingest.tasks.keys import why_excluded

FLAT = np.zeros((STEPS, ACTIONS))


def a_site(seed: int = 1) -> Site:
    return site(np.random.default_rng(seed))


def test_a_trap_looks_best_and_costs_most() -> None:
    place = a_site()
    for step in TRAPS:
        assert place.looks[step].argmax() == 0
        assert place.effect[step].argmin() == 0


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
        assert all(one.told for one, _ in group)
    for group in groups(one_user(night, rng)):
        assert sum(one.ready.caller == "user:one" for one, _ in group) <= 1


def test_merged_sessions_are_what_the_product_refuses() -> None:
    reasons = [why_excluded(steps) for steps in merged()]
    assert reasons == ["too_many_callers", "too_many_openings", "several_tasks"]
