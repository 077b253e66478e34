"""What judged groups prove, by hand."""

from __future__ import annotations

import math

import pytest

from deploy.evidence.betting import START, bet
from deploy.evidence.quality import CHART_LEVEL, Group, Limits, Quality, add_group, bounds

LIMITS = Limits(
    margin=0.05, anchor_margin=0.1, flaws={"short": 0.05, "invalid": 0.02, "evasive": 0.05}
)


def after(*groups: Group) -> Quality:
    quality = Quality()
    for group in groups:
        quality = add_group(quality, group, LIMITS)
    return quality


def test_each_claim_bets_against_its_own_mean() -> None:
    """A difference of +0.2 to the champion is 0.6 of 0..1, one of -0.1 to the anchor is 0.45."""
    quality = after(Group(champion=0.2, anchor=-0.1))

    assert quality.no_worse == bet(START, 0.6, 0.475)
    assert quality.anchored == bet(START, 0.45, 0.45)
    assert quality.better == bet(START, 0.6, 0.5)
    assert quality.harm == bet(START, 0.4, 0.5)
    assert (quality.groups, quality.unknown, quality.lost) == (1, 0, 0)


def test_the_champion_s_difference_to_the_anchor_is_that_of_the_two_differences() -> None:
    """-0.03 to the champion and +0.32 to the anchor: the champion is 0.35 above the anchor."""
    quality = after(Group(champion=-0.03, anchor=0.32))

    assert quality.over_anchor == bet(START, 0.66, 0.5)
    assert quality.champion_over_anchor.log_wealth == pytest.approx(
        bet(START, 0.675, 0.5).log_wealth
    )
    assert quality.champion_to_anchor.total == pytest.approx(0.675)
    assert quality.to_anchor.total == pytest.approx(0.66)


def test_a_lost_group_says_nothing_of_champion_and_anchor() -> None:
    lost = after(Group(champion=None, anchor=None, fault="candidate"))

    assert lost.champion_over_anchor == START
    assert lost.over_anchor == bet(START, 0.0, 0.5)


def test_the_signs_are_right() -> None:
    """Twenty groups in which the candidate is better by 0.5, and by -0.5."""
    better = after(*[Group(champion=0.5, anchor=0.5)] * 20)
    worse = after(*[Group(champion=-0.5, anchor=-0.5)] * 20)

    assert min(better.no_worse.log_e, better.anchored.log_e, better.better.log_e) > math.log(10)
    assert better.harm.log_e < 0
    assert max(worse.no_worse.log_e, worse.anchored.log_e, worse.better.log_e) < 0
    assert worse.harm.log_e == better.better.log_e


def test_an_equal_candidate_earns_the_margin_and_is_never_better() -> None:
    """A difference of 0 is above the mean of a candidate that is worse by the margin."""
    quality = after(*[Group(champion=0.0, anchor=0.0)] * 200)

    assert quality.no_worse.peak >= math.log(20)
    assert quality.better.peak == quality.harm.peak == 0.0


def test_a_group_lost_by_the_candidate_counts_as_the_worst_one() -> None:
    lost = after(Group(champion=None, anchor=None, fault="candidate"))
    worst = after(Group(champion=-1.0, anchor=-1.0))

    assert (lost.no_worse, lost.anchored, lost.harm) == (
        worst.no_worse,
        worst.anchored,
        worst.harm,
    )
    assert (lost.groups, lost.lost) == (1, 1)


def test_a_group_lost_by_the_champion_speaks_against_harm_and_for_nothing() -> None:
    lost = after(Group(champion=None, anchor=None, fault="champion"))

    assert lost.harm == after(Group(champion=1.0, anchor=1.0)).harm
    assert lost.no_worse == lost.anchored == lost.better == START
    assert (lost.groups, lost.unknown, lost.champion_lost, lost.lost) == (0, 1, 1, 0)
    low, high = bounds(lost.chart, CHART_LEVEL)
    assert low + high >= 1.0


def test_answers_that_get_lost_equally_often_are_no_harm() -> None:
    """Each arm alone loses 10% of 1,500 groups of two equal adapters, the candidate's first."""
    candidate, champion = (
        Group(champion=None, anchor=None, fault=fault) for fault in ("candidate", "champion")
    )
    ten = [candidate, *[Group(champion=0.0, anchor=0.0)] * 8, champion]

    quality = after(*ten * 150)

    assert math.exp(quality.harm.peak) < 5, "20 is the limit"
    assert (quality.lost, quality.champion_lost) == (150, 150)


def test_a_flaw_within_its_limit_proves_nothing() -> None:
    """One of twenty answers more than the champion's is the limit."""
    groups = [Group(champion=0.0, anchor=0.0, flaws={"short": one}) for one in (1.0, *[0.0] * 19)]

    assert after(*groups * 20).flaws["short"].log_e < math.log(2)


@pytest.mark.parametrize("fault", ["champion", "unknown"])
def test_a_group_that_others_lost_says_nothing_and_is_counted(fault: str) -> None:
    group = Group(champion=None, anchor=None, fault=fault)  # type: ignore[arg-type]

    quality = after(group, Group(champion=0.1, anchor=0.1), group)

    assert (quality.groups, quality.unknown) == (1, 2)
    assert quality.unknown_share == pytest.approx(2 / 3)
    assert quality.no_worse == after(Group(champion=0.1, anchor=0.1)).no_worse


def test_flaws_count_beside_the_judge_also_where_it_gave_no_score() -> None:
    """All of the candidate's answers are cut short and none of the champion's."""
    group = Group(champion=None, anchor=None, fault="unknown", flaws={"short": 1.0, "invalid": 0.0})

    quality = after(*[group] * 25)

    assert quality.flaws["short"].peak >= math.log(200)
    assert quality.flaws["invalid"].peak == 0.0
    assert quality.flaws["evasive"].observations == 0
    assert quality.groups == 0


def test_the_chart_holds_the_mean() -> None:
    quality = after(*[Group(champion=0.3, anchor=0.3), Group(champion=-0.1, anchor=-0.1)] * 200)

    low, high = bounds(quality.chart, CHART_LEVEL)

    assert 2 * low - 1 < 0.1 < 2 * high - 1
    assert high - low < 0.12
