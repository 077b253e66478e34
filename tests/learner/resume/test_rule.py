"""How often a run is resumed, and how it is said."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from learner.origin import settings_of_result
from learner.resume import Death, resumed_words, why_not_again
from sidecar.settings import Learner


def death(checkpoint: int = 0, place: str | None = "", step: int = 0) -> dict[str, Any]:
    return asdict(Death(at=1.0, checkpoint=checkpoint, step=step, steps=4, place=place))


def test_a_run_that_dies_in_the_same_group_three_times_is_given_up() -> None:
    twice = [death(2, "g"), death(2, "g")]

    assert why_not_again(twice) is None
    assert why_not_again([*twice, death(2, "g")]) == "it died 3 times while it computed group g"
    assert why_not_again([*twice, death(2, "h")]) is None
    assert why_not_again([*twice, death(3, "g")]) is None, "it did a step between"


def test_a_run_that_dies_while_it_loads_is_given_up_too() -> None:
    assert why_not_again([death()] * 3) == "it died 3 times while it loaded, stepped or saved"


def test_a_run_that_dies_ever_elsewhere_and_gets_no_further_is_given_up() -> None:
    deaths = [death(1, f"g{number}") for number in range(10)]

    assert why_not_again(deaths[:9]) is None
    assert why_not_again(deaths) == "it died 10 times without another step"


def test_deaths_between_which_steps_were_done_do_not_add_up() -> None:
    assert why_not_again([death(number, "g") for number in range(50)]) is None


def test_stops_count_towards_no_limit() -> None:
    stopped = {**death(), "stopped": True}

    assert why_not_again([stopped] * 20) is None
    assert why_not_again([*[stopped] * 20, death(), death()]) is None


def test_settings_that_do_not_touch_the_weights_do_not_matter() -> None:
    other = Learner(schedule="manual", max_groups=5).model_dump(mode="json")

    assert settings_of_result(other) == settings_of_result(Learner().model_dump(mode="json"))
    assert "processes" in settings_of_result(other), "sums of two processes round otherwise"


def test_words() -> None:
    assert resumed_words([death(3, step=2)]) == "resumed from step 2 of 4"
    assert resumed_words([death()]) == "resumed before its first step"
    assert resumed_words([death(), death(3, step=2)]) == "resumed from step 2 of 4, after 2 kills"
    assert [resumed_words(none) for none in (None, [], ["x"], "damaged")] == ["", "", "", ""]
