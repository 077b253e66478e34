"""How long a canary takes at a site's traffic, and the distance to the best so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deploy.registry import versions
from deploy.registry.candidates import best_so_far, pace, sessions_a_day, steps_days
from sidecar.lines import Line
from sidecar.settings import Canary as CanarySettings
from support.adapter_endpoints import MODEL
from support.made_canary import made_canary

if TYPE_CHECKING:
    from tests.deploy.conftest import World

RULES = CanarySettings()
LINE = Line(name=MODEL)
DAY_S = 86_400.0


def measured(world: World) -> float:
    with world.database.read() as session:
        return sessions_a_day(session, LINE, world.clock.now)


def test_sessions_are_counted_once_over_the_last_week(world: World) -> None:
    world.clock.now = 100 * DAY_S
    world.serve("long-ago")
    world.clock.now += 8 * DAY_S
    for number in range(14):
        world.serve(f"s{number}")
        world.serve(f"s{number}")

    assert measured(world) == pytest.approx(2.0)


def test_an_evening_is_not_taken_for_a_day(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six sessions of two requests in the last hours of each of ten days; it is asked after."""
    monkeypatch.setattr("deploy.registry.candidates.EXAMINED", 24)
    for day in range(10):
        for number in range(6):
            world.clock.now = (100 + day) * DAY_S - (6 - number) * 3600.0
            world.serve(f"{day}-{number}")
            world.serve(f"{day}-{number}")
    world.clock.now += 60.0

    assert measured(world) == pytest.approx(6.0)


def test_a_store_that_has_just_begun_is_taken_for_a_day_old(world: World) -> None:
    assert measured(world) == 0.0
    for number in range(3):
        world.serve(f"s{number}")

    assert measured(world) == pytest.approx(3.0)


def test_the_steps_of_twenty_sessions_a_day_take_a_week() -> None:
    assert steps_days((2_000, 5_000), RULES, 20.0) == pytest.approx([5.0, 2.0])
    assert steps_days((2_000, 5_000), RULES, 20.0, seen=16) == pytest.approx([1.0, 2.0])
    assert steps_days((2_000,), RULES, 0.0) == [float("inf")]


def test_the_pace_names_days_traffic_and_groups() -> None:
    gating = made_canary(phase="gating", steps=(2_000, 5_000))
    last = made_canary(steps=(2_000, 5_000), step=1, proven=frozenset({"no_worse", "anchored"}))
    evidence: dict[str, Any] = {"quality": {"groups": 40}, "step_2": {"sessions": 15}}

    assert pace(gating, evidence, RULES, 20.0) == (
        "About 7 days at today's traffic (20 sessions a day) for its steps, about 19 days in all "
        "for an equal candidate: it needs about 310 more judged groups, and new sessions bring "
        "16 a day."
    )
    assert pace(last, evidence, RULES, 20.0) == (
        "Less than a day at today's traffic (20 sessions a day) for its steps."
    )
    never = RULES.model_copy(update={"step_min_sessions": 400})
    assert pace(gating, evidence, never, 20.0) == (
        "No step can end at today's traffic (20 sessions a day): one wants 400 sessions, and ends "
        "after 28 days; lower canary.step_min_sessions."
    )
    assert pace(last, evidence, RULES, 0.0) == (
        "No end can be told: there was no session in the last week."
    )


def test_the_distance_to_the_best_is_that_of_the_newest_canary_which_measured_it(
    world: World,
) -> None:
    first, second = world.register(1), world.register(2)
    world.promote(first)
    with world.database.write() as session:
        versions.move_alias(
            session, model=MODEL, alias="anchor", to=first, now=1.0, actor="control", reason="best"
        )
        assert best_so_far(session, MODEL, first, first) == (
            f"The champion {first} is the best so far (the anchor)."
        )
    world.promote(second)
    with world.database.write() as session:
        row = world.canary_row(session, second)
        assert best_so_far(session, MODEL, second, first).endswith("was not compared with it yet.")
        measured = {"candidate": [-0.04, 0.02], "champion": [-1.0, 1.0]}
        row.evidence = {**row.evidence, "quality": {"to_anchor": measured}}
        session.flush()
        assert best_so_far(session, MODEL, second, first) == (
            f"The best so far is {first} (the anchor); the champion's difference to it is -0.040 "
            f"to +0.020, by the groups of canary {row.canary_id}."
        )
        assert best_so_far(session, MODEL, "base", "base") == ""
