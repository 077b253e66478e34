"""When a judge counts as another one: rates against simulated judges, and what is said."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ingest.noise.estimate import changes_within, drifts
from support.simulated_judge import (
    CHANGES,
    EVEN,
    EXACT,
    HARSHER,
    OTHER_TASTE,
    UNEVEN,
    WINDOW,
    SimulatedJudge,
    alarm_share,
    estimated,
    first_window_alarm_share,
)


@pytest.mark.parametrize("judge", [EVEN, UNEVEN, EXACT], ids=["even", "uneven", "exact"])
def test_a_judge_that_stays_the_same_raises_few_alarms(judge: SimulatedJudge) -> None:
    # FALSE_ALARMS is 1%: of 150 windows, more than 7 happen once in 3,000 runs; the seeds are fixed
    assert alarm_share(judge, judge, windows=150, seed=50_000) <= 7 / 150


@pytest.mark.parametrize("name", ["noise x 2", "slope -0.1 to 0", "slope -0.1 to +0.1"])
def test_another_noise_or_slope_is_found_by_the_next_whole_window(name: str) -> None:
    assert alarm_share(UNEVEN, CHANGES[name], windows=20) >= 0.95


@pytest.mark.parametrize("other", [OTHER_TASTE, HARSHER], ids=["taste", "level"])
def test_a_model_as_good_as_the_one_before_is_found_by_groups_scored_across_the_change(
    other: SimulatedJudge,
) -> None:
    assert alarm_share(UNEVEN, UNEVEN, other, windows=20) >= 0.8


def test_the_alarm_says_what_changed_and_against_what() -> None:
    before = estimated(UNEVEN, groups=WINDOW, seed=1)
    now = estimated(replace(UNEVEN, noise=0.15, slope=0.2), groups=WINDOW, seed=2)

    words = drifts(now, before=before, reference=before)

    said = re.sub(r"\d\.\d{3}", "N", "; ".join(words))
    assert said == (
        "noise sd N, the window before N; position slope +N, the window before -N; "
        "noise sd N, the reference window N; position slope +N, the reference window -N"
    )


def test_a_first_window_is_compared_with_itself() -> None:
    steady = estimated(UNEVEN, groups=WINDOW, seed=3)
    first, second = (estimated(UNEVEN, groups=WINDOW // 2, seed=seed) for seed in (4, 5))

    assert changes_within(steady, first, second) == ()
    shifted = estimated(UNEVEN, replace(UNEVEN, level=0.2), groups=WINDOW, seed=3)
    (said,) = changes_within(shifted, None, None)
    assert said.startswith("the second scoring gives +0.")
    other = estimated(replace(UNEVEN, noise=0.15, slope=0.2), groups=WINDOW // 2, seed=5)
    said = re.sub(r"\d\.\d{3}", "N", "; ".join(changes_within(steady, first, other)))
    assert said == (
        "in the second half of the window noise sd N, in the first half N; "
        "in the second half of the window position slope +N, in the first half -N"
    )


@pytest.mark.parametrize("judge", [EVEN, UNEVEN, EXACT], ids=["even", "uneven", "exact"])
def test_the_first_window_of_a_judge_that_stays_the_same_raises_few_alarms(
    judge: SimulatedJudge,
) -> None:
    # FALSE_ALARMS is 1%: of 300 windows, more than 9 happen once in 1,000 runs; the seeds are fixed
    assert first_window_alarm_share(judge, judge, at=25, windows=300, seed=90_000) <= 9 / 300


@pytest.mark.parametrize("name", ["noise x 2", "slope -0.1 to 0", "slope -0.1 to +0.1"])
def test_another_noise_or_slope_is_found_within_the_first_window(name: str) -> None:
    assert first_window_alarm_share(UNEVEN, CHANGES[name], at=25, windows=20) >= 0.8


def test_a_difference_too_small_to_matter_raises_no_alarm() -> None:
    quiet = estimated(SimulatedJudge(noise=0.0005), groups=WINDOW, seed=1)
    louder = estimated(SimulatedJudge(noise=0.002, level=0.0), groups=WINDOW, seed=2)

    assert drifts(louder, before=quiet) == ()
