"""The curve over versions: links, their intervals, and the way to the origin."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deploy.evidence.progress import Estimate, Link, after, counts_as, curve, estimate


def known(mean: float, half: float, groups: int = 30) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, groups=groups)


def link(
    candidate: str,
    champion: str,
    to_champion: Estimate | None,
    anchor: str | None = None,
    to_anchor: Estimate | None = None,
) -> Link:
    return Link(
        canary_id=f"c-{candidate}",
        candidate=candidate,
        champion=champion,
        anchor=anchor or champion,
        ended_at=1.0,
        to_champion=to_champion,
        to_anchor=to_anchor,
    )


def test_gains_add_up_along_the_chain_and_their_errors_too() -> None:
    origin, points = curve(
        [link("v1", "base", known(0.10, 0.03)), link("v2", "v1", known(0.20, 0.04))]
    )

    assert origin == "base"
    gain = points[1].gain
    assert gain is not None
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.30, 0.23, 0.37))
    assert (gain.groups, points[1].links) == (60, 2)


def test_a_chain_has_one_scale_and_begins_where_the_newest_of_them_begins() -> None:
    judged = [link("v1", "base", known(0.10, 0.03)), link("v2", "v1", known(0.20, 0.04))]
    played = [
        replace(link(name, before, known(0.30, 0.1)), of_tasks=True)
        for name, before in (("v3", "v2"), ("v4", "v3"))
    ]

    origin, points = curve([*judged, *played])

    assert origin == "v2"
    assert [one.adapter for one in points] == ["v3", "v4"]
    assert points[1].gain == known(0.60, 0.2, groups=60)
    assert curve([*judged, *played, link("v5", "v4", known(0.1, 0.1))])[0] == "v4"


def test_a_version_that_was_compared_with_the_origin_needs_no_chain() -> None:
    chained = [link("v1", "base", known(0.10, 0.20)), link("v2", "v1", known(0.20, 0.20))]
    direct = [*chained, link("v3", "v2", known(0.1, 0.2), "base", known(0.33, 0.1))]

    point = curve(direct)[1][2]

    assert point.gain == known(0.33, 0.1)
    assert point.links == 1


def test_a_link_that_is_not_known_hides_what_follows_until_the_anchor_shows_it_again() -> None:
    _, points = curve(
        [
            link("v1", "base", None),
            link("v2", "v1", known(0.1, 0.1)),
            link("v3", "v2", known(0.1, 0.1), "base", known(0.4, 0.1)),
            link("v4", "v3", known(0.1, 0.0)),
        ]
    )

    assert [one.gain and round(one.gain.mean, 3) for one in points] == [None, None, 0.4, 0.5]


def test_after_a_rollback_the_chain_goes_on_from_what_served_then() -> None:
    _, points = curve(
        [
            link("v1", "base", known(0.2, 0.1)),
            link("v2", "v1", known(-0.5, 0.1)),
            link("v3", "v1", known(0.1, 0.0)),
        ]
    )

    assert points[2].gain is not None
    assert points[2].gain.mean == pytest.approx(0.3)


def test_the_interval_holds_the_mean_at_every_stop_and_shrinks() -> None:
    """The stop is the worst one: when the lower end is first above the true mean, if ever."""
    rng, missed = random.Random(3), 0
    for _ in range(40):
        values = tuple(rng.choice((-0.4, -0.1, 0.2, 0.5)) for _ in range(60))  # its mean is 0.05
        ends = [estimate(values[:n]) for n in (5, 10, 20, 40, 60)]
        missed += any(one is not None and not one.low <= 0.05 <= one.high for one in ends)
    few, many = estimate((0.3, 0.1) * 10), estimate((0.3, 0.1) * 50)

    assert missed <= 2  # 5% of 40
    assert few is not None
    assert many is not None
    assert many.mean == pytest.approx(0.2)
    assert few.low < many.low < many.mean < many.high < few.high
    assert many.low > 0.0
    mirrored = estimate((-0.3, -0.1) * 50)
    assert mirrored is not None
    assert (mirrored.low, mirrored.high) == pytest.approx((-many.high, -many.low))
    assert estimate(()) is None


def test_answers_that_cannot_be_scored_are_the_worst_of_either_arm() -> None:
    faults = ("candidate", "champion", "unknown", None)

    assert [counts_as(None, fault) for fault in faults] == [-1.0, 1.0, None, None]
    assert counts_as(0.2, None) == 0.2


def test_a_sum_stays_a_difference_of_scores() -> None:
    whole = after(known(0.7, 0.1), known(0.6, 0.1))

    assert (whole.mean, whole.high) == (1.0, 1.0)
