"""The figures of the groups benchmark, by cases worked by hand."""

from __future__ import annotations

import pytest

from benchmarks.groups.recording import Step, told
from benchmarks.groups.run import by_opening, factor, yielded
from ingest.grouping.features import Features


def step(*, spread: bool, tokens: int = 100, free: bool = False, opening: str = "o") -> Step:
    return Step(
        kind="chat",
        opening=opening,
        features=Features(),
        spread=spread,
        tokens=tokens,
        free_spread=free,
        served=1,
    )


def test_what_is_yielded_is_groups_with_a_spread_for_a_token() -> None:
    steps = [step(spread=True), step(spread=False, tokens=300)]

    assert yielded(steps, lambda _: 1.0) == 1 / 400
    assert factor(steps, lambda one: 1.0 if one.spread else 0.5) == pytest.approx(400 / 250)


def test_history_of_an_opening_leaves_out_the_step_itself() -> None:
    steps = [step(spread=True), step(spread=True), step(spread=False)]

    def earlier(found: list[Step]) -> list[tuple[int, int]]:
        return [(one.features.earlier, one.features.earlier_spread) for one in found]

    assert earlier(told(steps, steps, own=True)) == [(2, 1), (2, 1), (2, 2)]
    assert earlier(told(steps[:1], steps, own=False)) == [(3, 2)]


def test_the_best_by_opening_keeps_those_that_yield_most_for_a_token() -> None:
    good = [step(spread=True, opening="a"), step(spread=False, opening="a")]
    bad = [step(spread=True, opening="b"), *(step(spread=False, opening="b") for _ in range(3))]

    weight = by_opening([*good, *bad])

    assert [weight(one) for one in (good[1], bad[0])] == [1.0, 0.1]
    # 1 + 0.1 groups for 200 + 0.1 * 400 tokens, over 2 for 600.
    assert factor([*good, *bad], weight) == pytest.approx((1.1 / 240) / (2 / 600))
