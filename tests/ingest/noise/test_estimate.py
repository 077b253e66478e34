"""The estimates against judges whose noise and bias are known, and against numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest

from ingest.noise.estimate import (
    Estimate,
    Twice,
    estimate,
    mean_figure,
    ratio,
    root_figure,
    two_sided_t,
    usable,
)
from ingest.records import ShownPass
from support.simulated_judge import EVEN, UNEVEN, SimulatedJudge, estimated, mixed, scored_twice


def one_pass(*scores: float, order: tuple[int, ...] | None = None) -> ShownPass:
    return ShownPass(order=order or tuple(range(len(scores))), scores=scores)


def twice(first: tuple[float, ...], again: tuple[float, ...]) -> Twice:
    return Twice(first=(one_pass(*first),), again=(one_pass(*again),))


def known(groups: list[Twice]) -> Estimate:
    found = estimate(groups)
    assert found is not None
    return found


def test_the_noise_of_two_groups_by_hand() -> None:
    groups = [
        twice((0.5, 0.7), (0.6, 0.6)),  # +0.1, -0.1: mean 0, squares 0.02
        twice((0.2, 0.4, 0.9), (0.5, 0.4, 0.9)),  # +0.3, 0, 0: mean 0.1, squares 0.06
    ]

    found = known(groups)

    # 0.08 / (2 * (1 + 2))
    assert found.sd.value == pytest.approx(math.sqrt(0.08 / 6))
    assert (found.groups, found.answers) == (2, 5)
    assert found.shift.value == pytest.approx(0.05)  # mean of 0 and 0.1
    # the pair (0.5, 0.7) ties the second time; (0.2, 0.4) turns round: 1 of 1 + 3 pairs
    assert found.flips.value == pytest.approx(0.25)


def test_what_all_answers_of_a_group_share_is_no_noise() -> None:
    groups = [twice((0.1, 0.5), (0.3, 0.7)), twice((0.6, 0.2), (0.1, -0.3))]

    found = known(groups)

    assert found.sd.value == pytest.approx(0.0, abs=1e-12)
    assert found.shift.value == pytest.approx((0.2 - 0.5) / 2)


def test_the_slope_of_scores_that_follow_the_position_alone() -> None:
    group = Twice(
        first=(one_pass(0.0, 0.5, 1.0), one_pass(1.0, 0.5, 0.0, order=(2, 1, 0))),
        again=(
            one_pass(0.5, 1.0, 0.0, order=(2, 0, 1)),
            one_pass(0.5, 0.0, 1.0, order=(1, 0, 2)),
        ),
    )

    found = known([group, group])

    assert found.slope.value == pytest.approx(1.0)
    assert found.first_minus_last.value == pytest.approx(-1.0)
    assert found.sd.value == pytest.approx(0.0)  # an order and its reverse cancel it
    assert found.pass_sd > 0.3


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_known_noise_is_found_for_every_size_and_number_of_passes(size: int, passes: int) -> None:
    judge = SimulatedJudge(noise=0.08, common=0.2, level=0.1)

    groups = scored_twice(judge, groups=2_000, seed=size * 10 + passes, size=lambda _: size,
                          passes=passes)  # fmt: skip
    found = known(groups)

    truth = 0.08 / math.sqrt(passes)
    assert found.sd.value == pytest.approx(truth, rel=0.05)  # 2,000 groups of 2: 1.6% error
    assert found.pass_sd == pytest.approx(0.08, rel=0.05)
    assert found.slope.value == pytest.approx(0.0, abs=0.02)
    assert abs(found.shift.value) < 4 * found.shift.error


def test_a_position_slope_is_found_and_is_noise_of_a_single_pass() -> None:
    judge = SimulatedJudge(noise=0.05, slope=-0.3, common=0.1)

    single = estimated(judge, groups=2_000, seed=1, passes=1)
    pair = estimated(judge, groups=2_000, seed=1, passes=2)

    for found in (single, pair):
        assert found.slope.value == pytest.approx(-0.3, abs=0.01)
        assert found.first_minus_last.value == pytest.approx(0.3, abs=0.015)
    assert pair.sd.value == pytest.approx(0.05 / math.sqrt(2), rel=0.05)  # it cancels
    assert single.sd.value > 2 * pair.sd.value


def test_the_noise_is_what_spreads_the_scores_of_equal_answers() -> None:
    """Independent of the estimator: the variance of the scores of equal answers, in new groups."""
    judge = SimulatedJudge(noise=0.06, slope=0.2, common=0.1, uneven=True)
    found = estimated(judge, groups=3_000, seed=5, passes=1)

    spreads = []
    for group in scored_twice(replace(judge, seed=9), groups=3_000, seed=6, passes=1):
        apart = [a - b for a, b in zip(group.again[0].scores, group.first[0].scores, strict=True)]
        centre = mean(apart)
        spreads.append(sum((one - centre) ** 2 for one in apart) / (2 * (len(apart) - 1)))
    sizes = [group.size - 1 for group in scored_twice(judge, groups=3_000, seed=6, passes=1)]

    weighted = sum(s * n for s, n in zip(spreads, sizes, strict=True)) / sum(sizes)
    assert found.sd.value == pytest.approx(math.sqrt(weighted), rel=0.05)


@pytest.mark.parametrize("judge", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_the_intervals_hold_the_truth_nineteen_times_in_twenty(judge: SimulatedJudge) -> None:
    plain = replace(judge, step=0.0)
    truth = estimated(plain, groups=8_000, seed=77)

    inside = {"sd": 0, "slope": 0, "shift": 0}
    for seed in range(300):
        found = estimated(plain, groups=50, seed=1_000 + seed)
        for name in inside:
            figure, true = getattr(found, name), getattr(truth, name).value
            inside[name] += figure.low <= (0.0 if name == "shift" else true) <= figure.high

    # 95% of 300 is 285, with a standard deviation of 3.8
    assert all(270 <= number <= 299 for number in inside.values()), inside


def test_too_few_groups_give_no_estimate_and_a_steady_judge_gives_no_noise() -> None:
    group = twice((0.5, 0.7), (0.5, 0.7))

    assert estimate([]) is None
    assert estimate([group]) is None
    found = known([group, group])
    assert (found.sd.value, found.sd.low, found.sd.high, found.flips.value) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ((one_pass(0.5, 0.7),), (one_pass(0.5, 0.7, 0.1),)),
        ((one_pass(0.5, 0.7),), (one_pass(0.5, 0.7),) * 2),
        ((one_pass(0.5),), (one_pass(0.5),)),
    ],
    ids=["other answers", "other passes", "one answer"],
)
def test_scorings_that_do_not_compare_are_not_used(
    first: tuple[ShownPass, ...], again: tuple[ShownPass, ...]
) -> None:
    assert not usable(Twice(first=first, again=again))


@pytest.mark.parametrize(
    ("alpha", "freedom", "table"),
    [(0.05, 9, 2.262), (0.05, 19, 2.093), (0.05, 49, 2.010), (0.002, 49, 3.265),
     (0.01, 29, 2.756)],
)  # fmt: skip
def test_students_t_is_that_of_the_tables(alpha: float, freedom: int, table: float) -> None:
    assert two_sided_t(alpha, freedom) == pytest.approx(table, rel=2e-3)


def test_a_ratio_and_its_error_by_hand() -> None:
    # 3 / 4; residuals 1 - 0.75 and 2 - 2.25: sqrt(2 * (0.0625 + 0.0625) / 1) / 4
    assert ratio([(1.0, 1.0), (2.0, 3.0)]) == pytest.approx((0.75, 0.125))
    assert ratio([(1.0, 0.0), (2.0, 0.0)]) is None
    assert mean_figure([(1.0, 1.0)]) is None
    figure = root_figure([(1.0, 4.0)] * 10)
    assert figure is not None
    assert (figure.value, figure.error, figure.low, figure.high) == (0.5, 0.0, 0.5, 0.5)


def test_sizes_of_groups_are_mixed() -> None:
    sizes = {one.size for one in scored_twice(EVEN, groups=200, seed=0, size=mixed)}

    assert sizes == {2, 3, 4, 5, 6, 7, 8}
