"""The simulated canaries: they reach the product's rule, and its rivals' arithmetic is right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.canary import limits
from benchmarks.canary.play import compared, play
from benchmarks.canary.rivals import asymptotic_half_width
from benchmarks.canary.run import allowed
from benchmarks.canary.traffic import World, differences
from deploy.evidence.live import InOrder, Live, Turn
from deploy.registry.proof_rule import GUARD_LEVEL
from sidecar.settings import Canary as CanarySettings

RULES = CanarySettings(steps=(2_000, 5_000))


@pytest.mark.parametrize(
    ("groups", "mean", "low", "high"),
    [
        (100, 0.06, -0.11849859894641054, 0.23849859894641054),
        (500, 0.06, 0.007346828635307702, 0.1126531713646923),
        (2_000, 0.03, 0.006205311956760166, 0.053794688043239836),
    ],
)
def test_the_rival_s_interval_is_that_of_gbstats(
    groups: int, mean: float, low: float, high: float
) -> None:
    """gbstats 0.8.0, `SequentialTwoSidedTTest` tuned for 5,000: one arm of constants and one of
    `groups` values with a standard deviation of 0.35, which it counts as 2 `groups` values."""
    half = asymptotic_half_width(variance=2 * 0.35**2, count=2 * groups, level=0.05)

    assert (mean - half, mean + half) == pytest.approx((low, high), abs=1e-9)


def test_a_much_worse_candidate_never_meets_a_user() -> None:
    ended = play(World(effect=-0.5), RULES, seed=1)

    assert (ended.phase, ended.canary_sessions) == ("rolled_back", 0)


def test_a_better_candidate_is_promoted_and_a_failing_one_is_not() -> None:
    assert play(World(effect=0.2), RULES, seed=1).phase == "promoted"
    failing = World(low=0.0, high=0.0, error_rate=0.5)
    assert play(failing, RULES, seed=1).phase == "rolled_back"


def test_groups_lose_either_arm_s_answers_alike_and_have_flaws_of_both() -> None:
    world, rng = World(lost=0.2, flawed=0.3), random.Random(2)
    scores = differences(world, rng)

    made = [compared(world, scores, rng) for _ in range(2_000)]

    faults = Counter(one.fault for one in made)
    assert faults["candidate"] == pytest.approx(320, rel=0.2)
    assert faults["champion"] == pytest.approx(320, rel=0.2)
    assert faults["unknown"] == pytest.approx(80, rel=0.4)
    short = [one.flaws["short"] for one in made if one.fault is None]
    assert {-1.0, -0.5, 0.0, 0.5, 1.0} == set(short)
    assert sum(short) / len(short) == pytest.approx(0.0, abs=0.05)


def false_rollbacks(
    play_one: Callable[[CanarySettings, int], dict[str, bool]], count: int
) -> float:
    return sum(play_one(RULES, seed)["guard"] for seed in range(count)) / count


def test_a_guard_for_which_a_unit_counts_at_every_turn_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, read = false_rollbacks(limits.guard, 8), Live._read

    def forget_and_read(live: Live, turn: Turn) -> None:
        if hash(turn.unit) in live._met:
            live._met[hash(turn.unit)] = 0
        read(live, turn)

    monkeypatch.setattr(Live, "_read", forget_and_read)

    assert right <= allowed(GUARD_LEVEL, 1_000) < false_rollbacks(limits.guard, 8)


def test_requests_that_count_in_the_order_of_their_ends_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = partial(limits.busy, most_turns=1, bad_share=0.2)
    right = false_rollbacks(lambda rules, seed: busy(rules, seed=seed), 8)
    add = InOrder.add

    def add_at_its_end(order: InOrder, turn: Turn, **times: Any) -> None:
        add(order, turn, **(times | {"started_at": times["stored_at"], "took_s": 0.0}))

    monkeypatch.setattr(InOrder, "add", add_at_its_end)

    assert (
        right
        <= allowed(GUARD_LEVEL, 1_000)
        < false_rollbacks(lambda rules, seed: busy(rules, seed=seed), 8)
    )


def test_a_level_that_is_exceeded_by_half_is_noticed_in_a_thousand_canaries() -> None:
    assert allowed(0.01, 1_000) < 0.02
    assert allowed(0.05, 1_000) < 0.075
    assert allowed(0.001, 1_000) < 0.005
