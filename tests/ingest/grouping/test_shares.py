"""Shares of the places for groups: who may hold how many, worked out by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from ingest.grouping.selection import SHARE, Caller, Shares, daily_demand, fill_level

ROBOT = Caller("p", "k", "robot")


def users(number: int, project: str = "p", key: str = "k") -> list[Caller]:
    return [Caller(project, key, f"u{n}") for n in range(number)]


def filled(places: int, demand: dict[Caller, int], shares: Shares) -> Counter[Caller]:
    """Everybody asks in turn until nobody gets a place."""
    held: Counter[Caller] = Counter()
    rest = dict(demand)
    while True:
        before = held.total()
        for caller in rest:
            if rest[caller] and held.total() < places and shares.has_room(caller):
                shares.take(caller)
                held[caller] += 1
                rest[caller] -= 1
        if held.total() == before:
            return held


@pytest.mark.parametrize(
    ("demands", "level"),
    [
        ([10.0, 10.0], math.inf),  # they do not fill 100 places
        ([1000.0], 100.0),
        ([1000.0, 1000.0], 50.0),
        ([10.0, 1000.0], 90.0),
        ([10.0, 20.0, 500.0, 500.0], 35.0),
        ([], math.inf),
    ],
)
def test_the_level_at_which_demands_fill_100_places(demands: list[float], level: float) -> None:
    assert fill_level(demands, 100) == level


def test_a_robot_holds_a_fifth_where_others_have_enough() -> None:
    demand = {ROBOT: 900, **dict.fromkeys(users(100), 5)}

    held = filled(100, demand, Shares(100, {}, dict(demand)))

    assert held[ROBOT] <= SHARE * 100
    assert held.total() == 100


def test_names_that_a_key_invents_are_one_share_of_the_keys() -> None:
    invented = [Caller("p", "loud", f"name-{n}") for n in range(500)]
    others = [one for key in range(9) for one in users(4, key=f"k{key}")]
    demand = {**dict.fromkeys(invented, 2), **dict.fromkeys(others, 10)}

    held = filled(100, demand, Shares(100, {}, dict(demand)))

    assert sum(held[one] for one in invented) <= SHARE * 100
    assert held.total() == 100


def test_projects_come_before_keys() -> None:
    loud = [one for key in range(50) for one in users(1, "loud", f"k{key}")]
    quiet = [one for project in "abcde" for one in users(1, project)]
    demand = {**dict.fromkeys(loud, 50), **dict.fromkeys(quiet, 50)}

    held = filled(100, demand, Shares(100, {}, dict(demand)))

    assert sum(held[one] for one in loud) <= SHARE * 100
    assert held.total() == 100


def test_places_that_are_held_already_count() -> None:
    demand = {ROBOT: 900.0, **dict.fromkeys(users(100), 5.0)}
    shares = Shares(100, {ROBOT: 20}, demand)

    assert not shares.has_room(ROBOT)
    assert shares.has_room(users(1)[0])


def test_the_demand_of_half_a_day_is_doubled_and_older_ones_are_left_out() -> None:
    day = 86_400.0
    asked = [(ROBOT, 1.5 * day), (ROBOT, 1.75 * day), (users(1)[0], 1.9 * day), (ROBOT, 0.5 * day)]

    assert daily_demand(asked, now=2 * day) == {ROBOT: 4.0, users(1)[0]: 2.0}
    assert daily_demand([], now=1.0) == {}


@given(
    st.dictionaries(
        st.builds(Caller, st.sampled_from("ab"), st.sampled_from("kl"), st.sampled_from("uvw")),
        st.integers(0, 60),
        max_size=12,
    ),
    st.integers(1, 60),
)
def test_no_place_stays_empty_that_somebody_wants(demand: dict[Caller, int], places: int) -> None:
    held = filled(places, demand, Shares(places, {}, {who: float(n) for who, n in demand.items()}))

    assert held.total() == min(places, sum(demand.values()))
    assert all(held[who] <= demand[who] for who in demand)
