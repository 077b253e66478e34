"""Agreement with a known order: figures worked by hand, and those of another implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ingest.calibration.figures import (
    Candidate,
    KnownGroup,
    Parts,
    Pass,
    Run,
    first_minus_last_parts,
    flip_parts,
    kendall_tau,
    noise_sd,
    over_groups,
    pairs_right,
    position_parts,
    repeat_parts,
)


@pytest.mark.parametrize(
    ("known", "judged", "tau"),
    [
        ([1, 2, 3], [0.1, 0.5, 0.6], 1.0),
        ([1, 2, 3], [0.5, 0.5, 0.5], 0.0),  # scipy: nan
        ([1, 1], [0.2, 0.9], None),
        ([2, 1, 3, 0, 0], [4, 0, 2, 4, 0], 0.117851130198),
        ([4, 1, 0, 0, 3, 3], [0, 1, 0, 4, 3, 0], -0.32025630761),
        ([4, 0, 1, 4, 0, 4, 4, 3], [0, 1, 0, 4, 1, 2, 3, 1], 0.35634832255),
        (
            [0.541, 0.571, 0.56, 0.682, 0.103, 0.571, 0.188, 0.097, 0.712, 0.564, 0.619, 0.496],
            [0.5, 0.8, 0.5, 0.9, 0.4, 0.2, 0.2, 0.8, 0.1, 0.3, 0.5, 0.3],
            -0.016012815381,
        ),
    ],
)
def test_tau_is_that_of_scipy(known: list[float], judged: list[float], tau: Any) -> None:
    """The values are those of `scipy.stats.kendalltau` 1.17.1."""
    assert kendall_tau(known, judged) == (tau and pytest.approx(tau, abs=1e-11))


def test_a_tie_is_half_a_pair_right() -> None:
    pairs = [(0, 1), (0, 2), (1, 2)]

    assert pairs_right(pairs, [0.9, 0.4, 0.4]) == 2.5
    assert pairs_right(pairs, [0.1, 0.4, 0.5]) == 0.0


def test_a_group_with_more_pairs_weighs_more() -> None:
    found = over_groups([(3, 10), (1, 2)], seed=0)

    assert found is not None
    assert found.groups == 2
    assert [found.value, found.low, found.high] == pytest.approx([4 / 12, 0.3, 0.5])


def test_the_interval_is_as_wide_as_theory_says_and_the_same_for_one_seed() -> None:
    # A hundred groups, half right: the mean has a standard error of 0.5 / sqrt(100).
    parts = [(float(number % 2), 1.0) for number in range(100)]

    found = over_groups(parts, seed=1)

    assert found is not None
    assert found == over_groups(parts, seed=1)
    assert found.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)


def test_no_groups_have_no_interval() -> None:
    assert over_groups([], seed=0) is None


# Position bias and noise of runs that were made by hand.


def run(*passes: tuple[Sequence[float], Sequence[int]], repeat: int = 0) -> Run:
    """passes: (scores by candidate, positions by candidate)."""
    count = len(passes[0][0])
    group = KnownGroup(
        group_id="g",
        task="",
        context=({"role": "user", "content": "q"},),
        tools=(),
        candidates=(Candidate(kind="", message={}, score=None),) * count,
        preferences=(),
    )
    shown = tuple(Pass(scores=tuple(s), positions=tuple(p)) for s, p in passes)
    return Run(group=group, repeat=repeat, passes=shown)


def means(found: Sequence[Parts]) -> list[float]:
    """The mean of each, where one group is all that there is."""
    return [total / count for ((total, count),) in found]


def test_the_first_position_minus_the_last_does_not_depend_on_quality() -> None:
    # Qualities 0.8, 0.4, 0.0; 0.2 more at the first position, 0.1 at the middle.
    there = ([1.0, 0.5, 0.0], [0, 1, 2])
    back = ([0.8, 0.5, 0.2], [2, 1, 0])

    ((total, passes),) = first_minus_last_parts([[run(there, back)]])

    assert total / passes == pytest.approx((1.0 - 0.0 + 0.2 - 0.8) / 2) == pytest.approx(0.2)


def test_an_answer_is_compared_with_itself_at_other_positions() -> None:
    there = ([1.0, 0.5, 0.0], [0, 1, 2])
    back = ([0.8, 0.5, 0.2], [2, 1, 0])

    found = position_parts([[run(there, back)]])

    # Means of the answers: 0.9, 0.5, 0.1. First: +0.1 and +0.1; last: -0.1 and -0.1.
    assert means(found) == pytest.approx([0.1, 0.0, -0.1])


def test_identical_candidates_stand_at_one_position() -> None:
    there, back = ([0.9, 0.9, 0.3], [1, 1, 0]), ([0.7, 0.7, 0.5], [0, 0, 1])

    found = position_parts([[run(there, back)]])

    # Means: 0.8 (shown once) and 0.4. First: 0.3 - 0.4 and 0.7 - 0.8; second: +0.1 and +0.1.
    assert means(found) == pytest.approx([-0.1, 0.1])


def test_a_bias_that_is_the_same_at_both_ends_shows_between_repeats() -> None:
    # All answers are worth 0; 0.3 more in the middle, where answer 1 stands, then answer 0.
    one = run(([0.0, 0.3, 0.0], [0, 1, 2]), ([0.0, 0.3, 0.0], [2, 1, 0]))
    two = run(([0.3, 0.0, 0.0], [1, 0, 2]), ([0.3, 0.0, 0.0], [1, 2, 0]), repeat=1)

    assert means(position_parts([[one]])) == [0.0, 0.0, 0.0]
    # Answers 0 and 1 are expected at 0.3 and 0 by the other run, and the other way round.
    assert means(position_parts([[one, two]])) == pytest.approx([-0.15, 0.3, -0.15])


def test_a_judge_that_gives_an_answer_one_score_everywhere_has_no_bias_whatever_the_orders() -> (
    None
):
    one = run(([0.9, 0.5, 0.1], [0, 1, 2]))
    two = run(([0.9, 0.5, 0.1], [0, 2, 1]), repeat=1)

    assert first_minus_last_parts([[one, two]]) == [(0.0, 2)]
    assert (position_parts([[one]]), first_minus_last_parts([[one]])) == ([], [])


def test_a_smaller_group_has_no_say_in_later_positions() -> None:
    small = run(([0.9, 0.1], [0, 1]), ([0.9, 0.1], [1, 0]))
    large = run(([0.9, 0.5, 0.1], [0, 1, 2]), ([0.9, 0.5, 0.1], [2, 1, 0]))

    found = position_parts([[small], [large]])

    assert [len(parts) for parts in found] == [2, 2, 1]


def test_a_flip_is_a_pair_whose_order_turns_round_with_the_order_shown() -> None:
    # Pairs (0,1): turned; (0,2): kept; (1,2): a tie in one of the two.
    there = ([0.9, 0.5, 0.1], [0, 1, 2])
    back = ([0.4, 0.5, 0.5 - 0.5], [2, 1, 0])
    tied = ([0.4, 0.4, 0.4], [0, 1, 2])

    assert flip_parts([[run(there, back)]]) == [(1 / 3, 1)]
    assert flip_parts([[run(there, tied)]]) == [(0.0, 1)]
    assert flip_parts([[run(there)]]) == []


def test_passes_are_compared_in_pairs() -> None:
    up, down = ([0.9, 0.1], [0, 1]), ([0.1, 0.9], [1, 0])

    assert flip_parts([[run(up, down, up, up)]]) == [(1.0, 2)]
    assert flip_parts([[run(up, down, up)]]) == [(1.0, 1)]  # the third has no reverse


def test_repeats_agree_by_the_order_of_their_means() -> None:
    one = run(([0.9, 0.5, 0.1], [0, 1, 2]))
    same = run(([0.8, 0.3, 0.2], [2, 1, 0]), repeat=1)
    turned = run(([0.1, 0.5, 0.9], [0, 2, 1]), repeat=2)

    assert repeat_parts([[one, same]]) == [(1.0, 1)]
    assert means([repeat_parts([[one, same, turned]])]) == pytest.approx([(1.0 - 1.0 - 1.0) / 3])
    assert repeat_parts([[one]]) == []


def test_a_repeat_without_any_order_agrees_with_nothing_whichever_comes_first() -> None:
    one, tied = run(([0.9, 0.1], [0, 1])), run(([0.5, 0.5], [0, 1]))

    assert repeat_parts([[one, tied]]) == repeat_parts([[tied, one]]) == [(0.0, 1)]


def test_noise_is_the_spread_of_one_answer_over_repeats() -> None:
    # Answer 0: 0.4 and 0.6, squares 0.02; answer 1: 0.5 twice. One degree of freedom each.
    one, two = run(([0.4, 0.5], [0, 1])), run(([0.6, 0.5], [1, 0]), repeat=1)

    assert noise_sd([[one, two]]) == pytest.approx(math.sqrt(0.02 / 2))
    assert noise_sd([[one]]) is None
