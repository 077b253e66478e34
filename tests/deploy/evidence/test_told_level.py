"""The level and the power of the guards that read what clients tell."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deploy.evidence.live import Live, Turn
from deploy.registry.proof_rule import guard_doubt, guard_harm, ratios_of


def play(
    seed: str,
    *,
    canary: float,
    champion: float,
    sessions: int,
    weights: tuple[float, ...],
    drift: float = 0.0,
    tells: tuple[float, float] = (1.0, 1.0),
    callers: int | None = None,
) -> tuple[str, int]:
    """Play sessions whose success has these chances, and grows by `drift` over all of them.

    tells: share of the canary's and of the champion's sessions with an outcome. callers: None: each
    session has one of its own. Returns: how it ended, and with how many of the canary's sessions.
    """
    rng, live = random.Random(seed), Live(ratios_of())
    for number in range(sessions):
        weight = weights[number * len(weights) // sessions]
        is_canary = rng.random() < weight
        chance = (canary if is_canary else champion) + drift * (number / sessions - 0.5)
        caller = f"key {number if callers is None else rng.randrange(callers)}"
        turn = Turn(unit=f"s{number}", canary=is_canary, weight=weight, caller=caller)
        success = rng.random() < chance
        if rng.random() < tells[not is_canary]:
            live.hear("outcome", turn, float(success))
        if guard_harm(live.told) is not None:
            return "harm", live.told["outcome"].units[True]
        if guard_doubt(live.told) is not None:
            return "doubt", live.told["outcome"].units[True]
    return "", live.told["outcome"].units[True]


RAMP = (0.05, 0.1, 0.25, 0.5)


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"drift": -0.7, "canary": 0.6, "champion": 0.6},
        {"drift": 0.7, "canary": 0.6, "champion": 0.6},
        {"tells": (0.9, 0.3)},
    ],
)
def test_an_equal_candidate_is_not_ended_more_often_than_the_level_says(
    world: dict[str, Any],
) -> None:
    """0.5% of 100 are 0.5; three or more of 100 would have a chance of 1.4%."""
    given: dict[str, Any] = {
        "canary": 0.8,
        "champion": 0.8,
        "sessions": 600,
        "weights": RAMP,
    } | world
    ended = [play(f"null-{number}", **given)[0] for number in range(100)]

    assert sum(map(bool, ended)) < 3


@pytest.mark.parametrize(("weight", "most"), [(0.5, 150), (0.05, 110)])
def test_a_success_rate_that_falls_from_0_8_to_0_5_is_found(weight: float, most: int) -> None:
    found = [
        play(f"harm-{number}", canary=0.5, champion=0.8, sessions=6_000, weights=(weight,))
        for number in range(9)
    ]

    assert {how for how, _ in found} == {"harm"}
    assert sorted(sessions for _, sessions in found)[4] <= most


def test_what_few_callers_tell_is_no_verdict_on_the_candidate() -> None:
    ended, _ = play("few", canary=0.0, champion=1.0, sessions=600, weights=(0.5,), callers=2)

    assert ended == "doubt"


def test_a_key_that_tells_of_all_sessions_is_one_caller_unless_it_may_speak_for_many() -> None:
    def told_by(*tellers: str) -> Live:
        live = Live(ratios_of())
        for number in range(200):
            turn = Turn(
                unit=f"s{number}",
                canary=number % 2 == 0,
                weight=0.5,
                caller=f"user {number}",
                tellers=tellers,
            )
            live.hear("outcome", turn, float(number % 2))
        return live

    assert guard_harm(told_by("key app").told) is None
    assert "evidence from 1 caller" in (guard_doubt(told_by("key app").told) or "")
    assert "evidence from 100 callers" in (guard_harm(told_by().told) or "")
