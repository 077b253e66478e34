"""The reward of a session by its outcomes."""

from __future__ import annotations

import pytest

from ingest.tasks.rewards import Scale, Told, reward_of, scale_of


def told(voice: str = "shop", at: float = 1.0, **changes: object) -> Told:
    return Told(voice=voice, received_at=at, **changes)  # type: ignore[arg-type]


def test_a_session_that_nobody_told_of_has_no_reward() -> None:
    assert reward_of([], Scale()) is None
    assert reward_of([told(done=True)], Scale()) is None


def test_of_one_voice_the_newest_counts_and_voices_are_averaged() -> None:
    flood = [told("liar", at=float(n), success=True) for n in range(1, 100)]
    corrected = [told(at=1.0, success=True), told(at=2.0, success=False)]

    assert reward_of(corrected, Scale()) == 0.0
    assert reward_of([*corrected, *flood], Scale()) == 0.5
    assert reward_of([*corrected, told(at=3.0, done=True)], Scale()) == 0.0


def test_a_value_says_more_than_success_and_is_clipped() -> None:
    assert reward_of([told(value=0.25, success=True)], Scale()) == 0.25
    assert reward_of([told(value=7.0)], Scale()) == 1.0
    assert reward_of([told(value=-7.0)], Scale()) == 0.0


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([], Scale()),
        ([0.5, 0.52, 0.54], Scale()),
        ([float(n) for n in range(101)], Scale(low=5.0, high=95.0)),
        ([*(float(n) for n in range(100)), 1e9], Scale(low=5.0, high=95.0)),
        ([3.0, 3.0], Scale(low=3.0, high=3.0)),
    ],
)
def test_the_scale_of_a_project_is_by_quantiles_unless_its_values_are_rewards(
    values: list[float], scale: Scale
) -> None:
    assert scale_of(values) == scale


def test_values_that_are_all_the_same_tell_nothing() -> None:
    assert scale_of([3.0, 3.0]).reward(3.0) == 0.5
    assert scale_of([float(n) for n in range(101)]).reward(50.0) == 0.5
