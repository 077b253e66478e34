"""The e-process by betting: by hand, and against the values of another program.

The vectors are of confseq 0.0.11 (`betting.betting_mart` with constant bets and `trunc_scale` 1,
averaged; `predmix.predmix_lower_cs`), by the authors of the method.
"""

from __future__ import annotations

import math
import random

import pytest

from deploy.evidence.betting import (
    FRACTIONS,
    START,
    Bets,
    begin,
    bet,
    bet_on_arm,
    log_mean_exp,
    pay_out,
    threshold,
)
from deploy.evidence.quality import EMPTY, bounds, observe

SHORT: tuple[float, ...] = (0.5, 0.62, 0.41, 0.9, 0.0, 1.0, 0.55, 0.55, 0.48, 0.73)
SHORT += (0.3, 0.66, 0.5, 0.81, 0.57, 0.2, 0.95, 0.64, 0.52, 0.6)
LONG = tuple(round((math.sin(1.7 * k) + 1) / 2, 6) for k in range(400))
ARMS = (1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0)


def after(values: tuple[float, ...], mean: float) -> list[Bets]:
    states = [START]
    for value in values:
        states.append(bet(states[-1], value, mean))
    return states


@pytest.mark.parametrize(
    ("values", "mean", "expected"),
    [
        (SHORT, 0.475, {1: 0.01647999714891279, 5: -0.20854484540245288, 20: 0.7060047716093436}),
        (SHORT, 0.5, {1: 0.0, 10: 0.054776207328845326, 20: 0.3418362281173233}),
        (LONG, 0.45, {50: 0.09446527996694874, 200: 0.8707101043691963, 400: 2.4322840903659073}),
        (ARMS, 3 / 11, {1: 0.6108002328616706, 5: 0.5012972010979097, 10: 0.43254178319292574}),
    ],
)
def test_evidence_is_that_of_confseq(
    values: tuple[float, ...], mean: float, expected: dict[int, float]
) -> None:
    states = after(values, mean)

    for observations, log_e in expected.items():
        assert states[observations].log_e == pytest.approx(log_e, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "observations", "low", "high"),
    [
        (SHORT, 0, 0.0, 1.0),
        (SHORT, 10, 0.0, 1.0),
        (SHORT, 20, 0.18066970430158458, 0.9683302956984153),
        (LONG, 50, 0.31025801280428233, 0.7089349471957177),
        (LONG, 200, 0.41403110325638404, 0.5868000191910625),
        (LONG, 400, 0.438433640390541, 0.5627164572519359),
    ],
)
def test_the_confidence_sequence_is_that_of_confseq(
    values: tuple[float, ...], observations: int, low: float, high: float
) -> None:
    sequence = EMPTY
    for value in values[:observations]:
        sequence = observe(sequence, value, 0.05)

    assert bounds(sequence, 0.05) == pytest.approx((low, high), abs=1e-9)


def test_one_observation_by_hand() -> None:
    """An observation of 1 against a mean of 1/2 multiplies a wealth by 1 + fraction."""
    state = bet(START, 1.0, 0.5)

    assert state.log_wealth == tuple(math.log1p(fraction) for fraction in FRACTIONS)
    assert math.exp(state.log_e) == pytest.approx(1 + sum(FRACTIONS) / 7)
    assert sum(FRACTIONS) / 7 == pytest.approx(2.21 / 7)


def test_the_order_of_observations_does_not_matter_to_the_evidence() -> None:
    forwards, backwards = after(SHORT, 0.475)[-1], after(SHORT[::-1], 0.475)[-1]

    assert forwards.log_e == pytest.approx(backwards.log_e, abs=1e-12)


def test_a_level_once_reached_stays_reached() -> None:
    risen = after((1.0,) * 10, 0.5)[-1]
    fallen = risen
    for _ in range(20):
        fallen = bet(fallen, 0.0, 0.5)

    assert fallen.log_e < risen.log_e == fallen.peak
    assert (fallen.peak_at, fallen.observations) == (10, 30)


@pytest.mark.parametrize(("value", "mean"), [(1.1, 0.5), (-0.1, 0.5), (0.5, 0.0), (0.5, 1.0)])
def test_what_cannot_be_bet_on_is_refused(value: float, mean: float) -> None:
    with pytest.raises(ValueError, match="cannot be bet on"):
        bet(START, value, mean)


def test_the_mean_of_huge_wealth_does_not_overflow() -> None:
    assert log_mean_exp((2_000.0, 0.0)) == pytest.approx(2_000.0 - math.log(2.0))
    assert threshold(0.05) == pytest.approx(math.log(20.0))


@pytest.mark.parametrize("mean", [0.1, 0.5])
def test_under_the_null_the_threshold_is_ever_passed_as_rarely_as_its_level(mean: float) -> None:
    """300 walks of 400 coins each: 5% may pass 20. With a mean that is larger, all do."""
    rng = random.Random(3)

    def passes(real: float) -> bool:
        state = START
        for _ in range(400):
            state = bet(state, float(rng.random() < real), mean)
        return state.peak >= threshold(0.05)

    assert sum(passes(mean) for _ in range(300)) <= 15 + 7  # two standard errors over 5%
    assert all(passes(mean + 0.2) for _ in range(20))


def test_paying_out_moves_wealth_and_makes_none() -> None:
    """So E stays a martingale under the null hypothesis, and the level that of all time."""
    state = begin(2, kept=0.5)
    assert math.exp(state.log_wealth[-1]) == pytest.approx(1.5)
    assert state.log_e == pytest.approx(0.0)

    for canary in (True, False, False, True, False):
        paid = pay_out(state, among=2)
        assert paid.log_e == pytest.approx(state.log_e, abs=1e-12)
        assert paid.log_wealth[-1] < state.log_wealth[-1]
        assert (paid.peak, paid.observations) == (state.peak, state.observations)
        assert pay_out(state, among=1).log_wealth[0] == state.log_wealth[0]
        state = bet_on_arm(paid, canary, 0.25, (2.0, 10.0, 1.0))

    left = math.prod(1 - 0.5 / (10 + number) for number in range(1, 6))
    assert math.exp(state.log_wealth[-1]) == pytest.approx(1.5 * left)


def test_the_level_holds_with_bets_that_begin_later() -> None:
    """E has a mean of 1 after each observation, whatever came before: by all 64 walks of six units
    of which a fifth are the canary's."""
    total = 0.0
    for walk in range(64):
        state, chance = begin(2, kept=0.5), 1.0
        for number in range(6):
            canary = bool(walk >> number & 1)
            chance *= 0.2 if canary else 0.8
            state = bet_on_arm(pay_out(state, among=1 + number % 2), canary, 0.25, (2.0, 10.0, 1.0))
        total += chance * math.exp(state.log_e)

    assert total == pytest.approx(1.0, abs=1e-12)
