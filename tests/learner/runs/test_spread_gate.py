"""Groups whose scores spread by no more than the judge's noise are not learned from."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from ingest.judge_noise import JudgedBy, MeasuredNoise
from ingest.records import Rewarded
from ingest.verifiers.records import Checked, Finding
from ingest.verifiers.rewarding import combine
from learner.runs.selection import (
    PASSING,
    Selection,
    chi_square_quantile,
    judge_share,
    noise_factor,
    select_groups,
    spread_gate,
)
from tests.learner.conftest import make_answer, make_scored_group

TRIED = 4_000


def measured(sd: float, passes: int = 1) -> dict[JudgedBy, MeasuredNoise]:
    one = MeasuredNoise(
        judge_model="judge", rubric_hash="rubric", passes=passes, groups=50, sd=sd, pass_sd=sd,
    )  # fmt: skip
    return {("judge", "rubric", passes): one}


def spreads(size: int, *, quality: float, rng: random.Random) -> list[list[float]]:
    """Scores of groups with noise of 0.05, whose answers differ by `quality`."""
    return [
        [0.5 + rng.gauss(0, quality) + rng.gauss(0, 0.05) for _ in range(size)]
        for _ in range(TRIED)
    ]


def passing(groups: Sequence[Sequence[float]], sd: float = 0.05) -> float:
    return fmean(pstdev(scores) >= sd * noise_factor(scores) for scores in groups)


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 3.841), (2, 5.991), (3, 7.815), (4, 9.488), (5, 11.070), (6, 12.592), (7, 14.067),
     (15, 24.996)],
)  # fmt: skip
def test_the_quantile_is_that_of_the_tables(freedom: int, table: float) -> None:
    assert chi_square_quantile(freedom, 0.95) == pytest.approx(table, abs=5e-4)


def test_the_factor_by_hand() -> None:
    assert noise_factor([0.1, 0.9]) == pytest.approx(math.sqrt(3.8415 / 2), rel=1e-4)
    assert noise_factor([k / 10 for k in range(8)]) == pytest.approx(1.3260, rel=1e-4)
    factors = [noise_factor([k / 20 for k in range(size)]) for size in range(3, 17)]
    assert factors == sorted(factors, reverse=True)  # a tie counted twice errs to the safe side


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_of_groups_of_pure_noise_one_in_twenty_passes(size: int) -> None:
    groups = spreads(size, quality=0.0, rng=random.Random(size))

    # the expectation that the threshold comes from, and the share: 5% +- 0.34% by chance
    squares = fmean(pstdev(scores) ** 2 for scores in groups)
    assert squares == pytest.approx(0.05**2 * (size - 1) / size, rel=0.06)
    assert passing(groups) == pytest.approx(PASSING, abs=0.014)


def select(*groups: object, sd: float | None) -> Selection:
    return select_groups(
        groups,  # type: ignore[arg-type]
        pack_tokens=100,
        noise=None if sd is None else measured(sd),
    )


def test_the_gate_is_the_noise_where_it_is_measured() -> None:
    group = make_scored_group([0.4, 0.6])

    assert spread_gate(group, {}).least == 0.02
    assert spread_gate(group, measured(0.01)).least == pytest.approx(0.01 * 1.3859, rel=1e-4)
    assert spread_gate(group, measured(0.0)).least == 0.005
    gate = spread_gate(group, measured(0.05))
    assert gate.least == pytest.approx(0.05 * 1.3859, rel=1e-4)
    assert gate.noise_sd == 0.05


def test_answers_that_do_not_count_have_no_part_in_the_gate() -> None:
    group = make_scored_group([0.4, 0.6, 0.9, 0.1])
    two = spread_gate(make_scored_group([0.4, 0.6]), measured(0.05))

    counted = [True, True, False, False]
    assert spread_gate(group, measured(0.05), counted=counted) == two
    masked = [make_answer(0), make_answer(1), make_answer(2, untrainable_reason="top_p")]
    selection = select(make_scored_group([0.4, 0.6, 0.9], answers=masked), sd=0.05)
    assert selection.gates == {"g": two}

    found = rewarded(checked("g", 1.0, 1.0, 1.0, 0.0, gate=True), scores=group.scores)
    told = replace(group, rewarded=found)
    gate = spread_gate(told, measured(0.05), counted=counted)
    assert gate.noise_sd == pytest.approx(0.4 * 0.05), "the gate squeezed the rewards of all"
    assert gate.least == gate.rest


def test_a_group_within_the_noise_is_dropped_with_its_gate() -> None:
    groups = [
        make_scored_group([0.40, 0.50], group_id="noise"),  # spread 0.05, under 0.0693
        make_scored_group([0.40, 0.60], group_id="signal"),  # 0.1
        make_scored_group([0.50, 0.51], group_id="flat"),  # 0.005
    ]

    selection = select(*groups, sd=0.05)

    assert selection.dropped == {"noise": "within_noise", "flat": "no_spread"}
    assert selection.quiet == 2
    assert [group.group_id for group in selection.groups] == ["signal"]
    assert set(selection.gates) == {"noise", "signal", "flat"}
    assert selection.gates["noise"].words == "least 0.0693, by judge noise of sd 0.0500"
    assert select(*groups, sd=None).dropped == {"flat": "no_spread"}


def test_a_sure_judge_that_squeezes_its_scores_is_learned_from_in_full() -> None:
    wide = [[0.1, 0.7], [0.2, 0.4], [0.5, 0.5]]
    squeezed = [[0.45 + 0.1 * one for one in scores] for scores in wide]
    groups = [
        make_scored_group(scores, group_id=str(place)) for place, scores in enumerate(squeezed)
    ]

    selection = select(*groups, sd=0.002)

    assert selection.dropped == {"2": "no_spread"}
    typical = math.sqrt((0.03**2 + 0.01**2) / 2)
    assert typical > 0.02
    assert selection.references == {"0": pytest.approx(typical), "1": pytest.approx(typical)}
    not_measured = select(*groups, sd=None)
    assert not_measured.dropped == {"1": "no_spread", "2": "no_spread"}
    assert not_measured.references == {}
    assert select(*groups, sd=0.006).references == dict.fromkeys("01", pytest.approx(0.03))
    assert select(groups[1], sd=0.002).references == {"1": 0.02}
    far = [make_scored_group(scores, group_id="far") for scores in ([0.0, 1.0],)]
    assert select(*far, sd=0.002).references == {"far": 0.25}


def test_the_noise_is_that_of_the_judge_and_rubric_that_scored_the_group() -> None:
    known = measured(0.4)["judge", "rubric", 1]
    noise = {("other judge", "rubric", 1): known, ("judge", "rubric of a project", 1): known}

    gate = spread_gate(make_scored_group([0.4, 0.6]), noise)

    assert (gate.least, gate.noise_sd) == (0.02, None)
    assert gate.words == "least 0.0200"


def test_the_noise_is_that_of_as_many_passes_as_the_group_has() -> None:
    group = make_scored_group([0.4, 0.6])
    noise = {**measured(0.07), **measured(0.05, passes=2)}

    gates = [spread_gate(replace(group, passes=passes), noise) for passes in (1, 2, 4)]

    assert [gate.noise_sd for gate in gates] == [0.07, 0.05, None]


def checked(name: str, *scores: float, weight: float = 1.0, gate: bool = False) -> Checked:
    return Checked(
        name=name, version="1", digest="d", weight=weight, gate=gate, pass_at=1.0,
        results=tuple(Finding(score=score) for score in scores), scores=scores,
    )  # fmt: skip


def rewarded(*found: Checked, scores: Sequence[float] = (0.4, 0.6)) -> Rewarded:
    return combine(scores, found)


@pytest.mark.parametrize(
    ("found", "share"),
    [
        (None, 1.0),
        (rewarded(), 1.0),  # no verifier counts
        (rewarded(checked("v", 1.0, 1.0, weight=3.0)), 0.25),
        (rewarded(checked("v", 1.0, 0.0)), 0.5),
        (rewarded(checked("g", 1.0, 1.0, gate=True)), 1.0),
        (rewarded(checked("g", 1.0, 0.5, gate=True)), 0.4),
        (rewarded(checked("g", 1.0, 0.5, gate=True, weight=0.0)), 0.4),
        (rewarded(checked("g", 0.0, 0.0, gate=True), checked("v", 1.0, 0.0)), 0.5),
        (Rewarded(rewards=(0.1, 0.2), independent=(0.5, 0.5), rule={"verifiers": [{}]}), 1.0),
    ],
    ids=["none", "nothing counts", "weights", "half", "all pass", "gate tells", "no weight",
         "both", "damaged"],
)  # fmt: skip
def test_the_noise_in_a_reward_is_that_of_the_judges_part(
    found: Rewarded | None, share: float
) -> None:
    group = replace(make_scored_group([0.4, 0.6]), rewarded=found)

    assert judge_share(found) == (share, share == 0.4)
    gate = spread_gate(group, measured(0.2))
    assert gate.rest == pytest.approx(share * 0.2 * 1.3859, rel=1e-4)
    assert gate.least == (0.02 if share == 0.4 else gate.rest)


def test_what_a_gate_or_a_verifier_tells_apart_is_learned_from() -> None:
    scores = (0.45, 0.55)
    by_gate = rewarded(checked("g", 1.0, 0.0, gate=True), scores=scores)
    alike = rewarded(checked("g", 1.0, 1.0, gate=True), scores=scores)
    by_weight = rewarded(checked("v", 1.0, 0.0), scores=scores)
    groups = [
        replace(make_scored_group(scores, group_id=name), rewarded=one)
        for name, one in (("gate", by_gate), ("alike", alike), ("weight", by_weight))
    ]

    selection = select(*groups, sd=0.08)

    # within 0.111 for the judge alone; with its weight of 3/4 they spread by 0.0875, over 0.083
    assert selection.dropped == {"alike": "within_noise"}
    assert [group.group_id for group in selection.groups] == ["gate", "weight"]


def test_scores_of_answers_that_the_judge_was_not_asked_about_have_no_noise() -> None:
    told_apart = rewarded(checked("v", 1.0, 0.0), scores=(0.5, 0.5))
    group = replace(make_scored_group([0.5, 0.5]), rewarded=told_apart)

    assert spread_gate(group, measured(0.4)).least == 0.02
