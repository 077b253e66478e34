"""Intervals, against published examples and against other ways to the same number."""

from __future__ import annotations

import math
from random import Random
from statistics import correlation, fmean, stdev

import pytest
from hypothesis import given, strategies as st

from ingest.reward_watch.rules import (
    MOST_FREEDOM,
    UNSEEN_LIKENESS,
    Moments,
    Rate,
    difference,
    mean_of,
    moments,
    pooled_correlation,
    rate_of,
    rise,
    t_of,
    wilson,
    z_of,
)

TAIL_95 = 0.025


def plain(hits: int, n: int) -> Rate:
    """A rate as the books have it, with normal limits: of so many sessions that t is normal."""
    return Rate(n=n, hits=hits, weight=float(n), sessions=MOST_FREEDOM + 2)


def test_the_normal_quantiles() -> None:
    assert z_of(0.025) == pytest.approx(1.959964, abs=1e-6)
    assert z_of(0.01) == pytest.approx(2.326348, abs=1e-6)


@pytest.mark.parametrize(
    ("freedom", "tail", "value"),
    # scipy.stats.t.isf(tail, freedom)
    [
        (1, 0.05, 6.313751514675), (1, 0.01 / 12, 381.9709908), (2, 0.025, 4.302652729696),
        (3, 0.0005, 12.923978636688), (4, 0.01, 3.746947387979), (9, 0.01 / 12, 4.4218690),
        (9, 0.001, 4.296805662729), (30, 0.001, 3.385184866829), (199, 0.025, 1.971956544249),
        (1_000, 0.001, 3.098402163913), (2_000, 0.01 / 12, 3.1482632),
    ],
)  # fmt: skip
def test_students_quantiles_are_those_of_scipy(freedom: int, tail: float, value: float) -> None:
    assert t_of(tail, freedom) == pytest.approx(value, rel=1e-7)


def test_the_quantile_by_adding_up_the_density() -> None:
    """A naive loop: the area under Student's density above the value."""
    for freedom in (1, 2, 5, 12):
        scale = math.gamma((freedom + 1) / 2) / (
            math.sqrt(freedom * math.pi) * math.gamma(freedom / 2)
        )
        value = t_of(0.02, freedom)
        step = value / 20_000
        below = sum(
            scale * (1 + ((k + 0.5) * step) ** 2 / freedom) ** (-(freedom + 1) / 2) * step
            for k in range(20_000)
        )
        assert 0.5 - below == pytest.approx(0.02, abs=1e-6)


def test_one_session_tells_nothing() -> None:
    one = Rate(n=200, hits=200, weight=200.0, sessions=1)

    assert (wilson(one, 0.01).low, wilson(one, 0.01).high) == (0.0, 1.0)
    assert t_of(0.01, 0) == math.inf


@pytest.mark.parametrize("sessions", [2, 4, 10, 40])
def test_the_limits_of_a_rate_in_few_sessions_are_passed_as_rarely_as_stated(sessions: int) -> None:
    """200 answers, alike by 0.3 within a session: above the true 30% in 5% of the draws."""
    rng = Random(sessions)
    draws, above = 2_000, 0
    size = 200 // sessions
    for _ in range(draws):
        pairs = []
        for _ in range(sessions):
            chance = rng.betavariate(0.3 * 7 / 3, 0.7 * 7 / 3)
            pairs.append((size, sum(rng.random() < chance for _ in range(size))))
        above += wilson(rate_of(pairs), 0.05).low > 0.3

    assert above / draws <= 0.065  # 5%, and three deviations of the simulation


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_is_the_published_one(hits: int, n: int, low: float, high: float) -> None:
    found = wilson(plain(hits, n), TAIL_95)

    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("now", "before", "low", "high"),
    # Newcombe 1998, "Interval estimation for the difference", table II, method 10.
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_the_interval_of_a_rise_is_the_published_one(
    now: tuple[int, int], before: tuple[int, int], low: float, high: float
) -> None:
    found = rise(plain(*now), plain(*before), TAIL_95)

    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@given(
    st.lists(st.integers(0, 1), min_size=2, max_size=60),
    st.integers(2, 9),
)
def test_answers_said_twice_weigh_no_more_than_once(hits: list[int], times: int) -> None:
    once = rate_of((1, hit) for hit in hits)
    often = rate_of((times, times * hit) for hit in hits)

    assert often.share == pytest.approx(once.share)
    assert (
        often.weight <= once.weight * 1.0001
        or sum(hits) in (0, len(hits))
        or min(often.hits, often.n - often.hits) < 20
    )
    assert 0 <= often.weight <= often.n


def test_sessions_of_one_kind_weigh_as_many_as_there_are_sessions() -> None:
    rate = rate_of([(10, 10), (10, 0)] * 20)

    assert rate.weight == pytest.approx(40 * 39 / 40)  # 40 sessions, one lost to the mean


def test_a_rate_that_shows_no_likeness_takes_a_usual_one() -> None:
    assert rate_of([(5, 0)] * 40).weight == pytest.approx(200 / (1 + 4 * UNSEEN_LIKENESS))
    assert rate_of([(1, 0)] * 40).weight == 40.0
    assert rate_of([]).weight == 0.0


def test_a_mean_of_single_answers_has_the_usual_error() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    found = mean_of((1, value) for value in values)

    assert found is not None
    assert found.mean == fmean(values)
    assert found.error == pytest.approx(stdev(values) / 2)
    assert mean_of([(5, 3.0)]) is None


def test_the_error_of_a_mean_is_that_of_resampled_sessions() -> None:
    rng = Random(3)
    sessions = []
    for _ in range(120):
        size, own = rng.randint(1, 9), rng.gauss(0, 1)
        sessions.append((size, sum(own + rng.gauss(0, 1) for _ in range(size))))
    found = mean_of(sessions)
    drawn = []
    for _ in range(2_000):
        some = rng.choices(sessions, k=len(sessions))
        drawn.append(sum(total for _, total in some) / sum(n for n, _ in some))

    assert found is not None
    assert found.error == pytest.approx(stdev(drawn), rel=0.06)


def test_the_difference_of_means_adds_their_variances() -> None:
    now, before = mean_of([(1, 1.0), (1, 3.0)]), mean_of([(1, 0.0), (1, 6.0)])

    assert now is not None
    assert before is not None
    found = difference(now, before, 0.05)
    assert found.value == -1.0
    assert found.high - found.value == pytest.approx(6.3138 * math.sqrt(1 + 9), rel=1e-4)


def test_a_group_alone_has_the_usual_correlation() -> None:
    lengths, scores = [10, 20, 40, 80], [0.1, 0.5, 0.4, 0.9]
    one = moments(lengths, scores)

    found = one.xy / math.sqrt(one.xx * one.yy)
    assert found == pytest.approx(correlation([math.log1p(n) for n in lengths], scores))


def test_what_differs_between_groups_does_not_count() -> None:
    """Long tasks have low scores, and within each task the longer answer has the higher score."""
    groups = [
        moments([length, 2 * length], [1 / length, 1 / length + 0.1])
        for length in (10, 100, 1_000, 10_000)
    ]
    found = pooled_correlation(groups)

    assert found is not None
    assert found.r == pytest.approx(0.999)
    across = correlation([10, 20, 100, 200, 1_000, 2_000], [0.1, 0.2, 0.01, 0.11, 0.001, 0.101])
    assert across < 0.2


def test_flat_groups_tell_nothing() -> None:
    assert pooled_correlation([moments([5, 5], [0.1, 0.9])] * 9) is None
    assert pooled_correlation([moments([5, 9], [0.5, 0.5])] * 9) is None
    assert pooled_correlation([moments([5, 9], [0.1, 0.9])] * 2) is None


@pytest.mark.parametrize("taste", [0.0, 0.4, 0.7])
def test_the_interval_of_a_correlation_covers_what_resampled_groups_give(taste: float) -> None:
    rng = Random(11)
    groups: list[Moments] = []
    for _ in range(80):
        logs = [rng.gauss(5, 0.5) for _ in range(8)]
        mean = fmean(logs)
        scores = [
            0.5 + 0.1 * (taste * (x - mean) / 0.5 + math.sqrt(1 - taste**2) * rng.gauss(0, 1))
            for x in logs
        ]
        groups.append(moments([round(math.expm1(x)) for x in logs], scores))
    found = pooled_correlation(groups)
    drawn = []
    for _ in range(1_000):
        some = pooled_correlation(rng.choices(groups, k=len(groups)))
        assert some is not None
        drawn.append(some.r)
    drawn.sort()

    assert found is not None
    band = found.interval(TAIL_95)
    assert (band.low, band.high) == pytest.approx((drawn[24], drawn[974]), abs=0.02)
    assert band.low < taste < band.high
