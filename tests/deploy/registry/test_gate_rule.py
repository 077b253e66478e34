"""The gate's arithmetic, by hand."""

from __future__ import annotations

import pytest

from deploy.canary.gate_store import is_short
from deploy.registry.canary_rule import (
    Comparison,
    bootstrap_interval,
    judge_gate,
    mean_difference,
    quality_of,
)
from deploy.registry.proof_rule import limits_of
from sidecar.settings import Canary as CanarySettings

RULES = CanarySettings(margin=0.05)


def test_difference_is_candidate_minus_champion() -> None:
    assert mean_difference([0.9, 0.5], [0.25, 0.25]) == pytest.approx(0.45)


def test_mean_over_the_prompts_that_were_scored() -> None:
    made = [Comparison(difference=0.25), Comparison(difference=None), Comparison(difference=-0.125)]

    verdict = judge_gate(made, RULES, seed=1)

    assert verdict.mean_difference == 0.0625
    assert (verdict.scored, verdict.set_aside) == (2, 1)
    assert verdict.passed


@pytest.mark.parametrize(("difference", "passed"), [(-0.04, True), (-0.05, False), (-0.06, False)])
def test_the_candidate_passes_above_minus_the_margin(difference: float, passed: bool) -> None:
    verdict = judge_gate([Comparison(difference=difference)], RULES, seed=1)

    assert verdict.passed is passed


def test_the_reason_says_numbers() -> None:
    verdict = judge_gate([Comparison(difference=-0.125)] * 2, RULES, seed=1)

    assert verdict.reason == (
        "gate: scored -0.125 against the champion on 2 held-out prompts, "
        "not above the margin of -0.050"
    )


@pytest.mark.parametrize(
    ("difference", "judged", "margin"),
    [
        (-0.0199, "-0.0199", "above the margin of -0.0200"),
        (-0.01999, "-0.01999", "above the margin of -0.02000"),
        (-0.0201, "-0.0201", "not above the margin of -0.0200"),
        (-0.02, "-0.020", "not above the margin of -0.020"),
        (-0.0189, "-0.019", "above the margin of -0.020"),
    ],
)
def test_numbers_that_differ_do_not_look_equal(difference: float, judged: str, margin: str) -> None:
    rules = RULES.model_copy(update={"margin": 0.02})

    assert judge_gate([Comparison(difference=difference)], rules, seed=1).reason == (
        f"gate: scored {judged} against the champion on 1 held-out prompt, {margin}"
    )


def test_one_prompt_is_no_prompts() -> None:
    reason = judge_gate([Comparison(difference=0.5)], RULES, seed=1).reason

    assert reason.startswith(
        "gate: scored +0.500 against the champion on 1 held-out prompt, above "
    )


def test_answers_of_set_aside_comparisons_count_for_the_guard() -> None:
    made = [
        Comparison(difference=0.5, candidate_answers=1, champion_answers=1),
        Comparison(difference=None, candidate_answers=1, candidate_short=1, champion_answers=1),
    ]

    verdict = judge_gate(made, RULES, seed=1)

    assert verdict.candidate_short_share == 0.5


def test_nothing_scored_does_not_pass() -> None:
    verdict = judge_gate([], RULES, seed=1)

    assert not verdict.passed
    assert verdict.mean_difference is None
    assert (verdict.low, verdict.high) == (None, None)


def test_the_interval_of_equal_values_is_that_value() -> None:
    assert bootstrap_interval([0.25] * 5, seed=3) == (0.25, 0.25)


def test_the_interval_is_the_same_for_the_same_seed_and_holds_the_mean() -> None:
    values = [0.0, 0.5, 1.0, 0.25, 0.75]

    low, high = bootstrap_interval(values, seed=3)

    assert (low, high) == bootstrap_interval(values, seed=3)
    # 5 values with standard deviation 0.354: the mean's is 0.158, two of them on either side.
    assert 0.15 <= low <= 0.30
    assert 0.70 <= high <= 0.85


@pytest.mark.parametrize(
    ("message", "finish_reason", "short"),
    [
        ({"content": "Yes."}, "stop", False),
        ({"content": "Yes, but"}, "length", True),
        ({"content": " \n"}, "stop", True),
        ({"content": None}, "stop", True),
        ({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls", False),
        ({"content": [{"type": "text", "text": "Yes."}]}, "stop", False),
        ({}, None, True),
    ],
)
def test_short_means_cut_or_saying_nothing(
    message: dict[str, object], finish_reason: str | None, short: bool
) -> None:
    assert is_short(message, finish_reason) is short


def test_a_group_without_a_score_of_the_anchor_is_no_evidence_for_it() -> None:
    """The champion's difference must not stand in for the anchor's, who may be far better."""
    limits = limits_of(CanarySettings())
    made = [Comparison(difference=0.1) for _ in range(100)]

    alone = quality_of(made, limits, anchored=False)
    beside = quality_of(made, limits, anchored=True)

    assert alone.anchored == alone.no_worse
    assert beside.no_worse == alone.no_worse
    assert (beside.groups, beside.anchored.observations) == (100, 0)


def test_a_scored_anchor_is_evidence_in_a_canary_that_has_one() -> None:
    made = [Comparison(difference=0.1, anchor_difference=-0.2)]

    quality = quality_of(made, limits_of(CanarySettings()), anchored=True)

    assert quality.anchored.log_e < 0.0 < quality.no_worse.log_e
