"""Agreement with a known order: figures worked by hand, and those of another implementation."""

from __future__ import annotations

import pytest

from ingest.calibration.figures import kendall_tau, over_groups, pairs_right


def test_tau_is_one_for_the_same_order_and_minus_one_for_the_reverse() -> None:
    assert kendall_tau([1, 2, 3], [0.1, 0.5, 0.6]) == 1.0
    assert kendall_tau([1, 2, 3], [0.6, 0.5, 0.1]) == -1.0


def test_tau_counts_ties_as_tau_b_does() -> None:
    # Pairs: (0,1) known tie; (0,2) and (1,2) known apart. Judged: (0,1) apart, (0,2) apart and
    # right, (1,2) a tie. Concordance 1, known apart 2, judged apart 2: 1 / sqrt(2 * 2).
    assert kendall_tau([0, 0, 1], [0.2, 0.7, 0.7]) == pytest.approx(0.5)


def test_a_judge_that_ties_everything_agrees_with_nothing() -> None:
    assert kendall_tau([1, 2, 3], [0.5, 0.5, 0.5]) == 0.0


def test_without_a_known_order_there_is_no_tau() -> None:
    assert kendall_tau([1, 1], [0.2, 0.9]) is None


@pytest.mark.parametrize(
    ("known", "judged", "tau"),
    [
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
def test_tau_is_that_of_scipy(known: list[float], judged: list[float], tau: float) -> None:
    """The values are those of `scipy.stats.kendalltau` 1.17.1."""
    assert kendall_tau(known, judged) == pytest.approx(tau, abs=1e-11)


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
