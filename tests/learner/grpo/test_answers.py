"""Each answer is decided about alone: recomputed values, masks of the server, drift, advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from learner.grpo.answers import Judged, judge_answers, untouched
from learner.records import CheckedAnswers, Fault, TrainingGroup
from learner.runs.selection import select_groups
from sidecar.settings import Learner
from tests.learner.conftest import make_answer, make_group, make_row, make_scored_group

PI = (-1.0, -2.0, -0.5, -0.1)
"""What the trainer computes for each answer's tokens."""
GRAMMAR = "masked_by_response_format"


@pytest.fixture
def answers() -> Any:
    """answers(logprobs of each answer, masked_by=): 4 tokens each, rewards 1, 0, 1, 0, ..."""

    def make(*logprobs: Sequence[float] | None, masked_by: str | None = None) -> TrainingGroup:
        rows = [
            replace(
                make_row([5, 6, 7, 8], (-1.0) ** place / 2, logprobs=values or (0.0,) * 4),
                recorded=values is not None,
            )
            for place, values in enumerate(logprobs)
        ]
        return replace(make_group([1, 2], rows), masked_by=masked_by)

    return make


def values(group: TrainingGroup) -> Mapping[int, Sequence[float]]:
    return dict.fromkeys(range(len(group.rows)), PI)


def settings(**changes: Any) -> Learner:
    return Learner(**changes)


def judged(group: TrainingGroup, **changes: Any) -> Judged:
    found = judge_answers(group, values(group), settings(**changes))
    assert isinstance(found, Judged), found
    return found


def faulty(group: TrainingGroup, **changes: Any) -> Fault:
    found = judge_answers(group, values(group), settings(**changes))
    assert isinstance(found, Fault), found
    return found


def test_exact_answers_pass_as_they_are(answers: Any) -> None:
    group = answers(PI, PI, PI)

    found = judged(group)

    assert found.group == group
    assert found.answers == CheckedAnswers(tokens=12)
    assert found.differences == [0.0] * 12


def test_tokens_that_a_grammar_touched_are_left_out_and_the_others_trained(answers: Any) -> None:
    """Recorded 0 where the grammar forced the token; the last was likely by itself."""
    forced = (0.0, -2.0, -0.5, 0.0)
    group = answers(forced, PI, PI, masked_by=GRAMMAR)

    found = judged(group)

    assert found.group.rows[0].kept == (False, True, True, True)
    assert [row.kept for row in found.group.rows[1:]] == [(), ()]
    assert found.answers.masked_tokens == {0: 1}
    assert found.answers.tokens == 11
    assert found.answers.left_out == {}
    assert found.differences == pytest.approx([0.0, 0.0, 0.1, *[0.0] * 8])


def test_an_answer_without_a_free_token_counts_in_the_baseline_and_is_not_trained(
    answers: Any,
) -> None:
    group = answers((0.0,) * 4, PI, PI, masked_by=GRAMMAR)
    group = replace(
        group, rows=(replace(group.rows[0], logprobs=(0.0, -1.0, 0.0, 0.2)), *group.rows[1:])
    )

    found = judged(group)

    assert found.answers.left_out == {0: "all_tokens_masked"}
    assert [row.trainable for row in found.group.rows] == [False, True, True]
    assert [row.counted for row in found.group.rows] == [True] * 3
    assert [row.advantage for row in found.group.rows] == [0.5, -0.5, 0.5]


def test_a_group_with_one_answer_that_has_free_tokens_is_left_out(answers: Any) -> None:
    every = (0.0, 0.0, 0.0, 0.2)

    fault = faulty(answers(every, every, PI, masked_by=GRAMMAR))

    assert fault.reason == "all_tokens_masked"
    assert fault.text == (
        f"2 of 3 answers are left out; answer 0: no token is the policy's own ({GRAMMAR})"
    )


def test_a_wrong_adapter_shows_behind_a_grammar_too(answers: Any) -> None:
    """What it makes likelier looks touched; what it makes rarer does not, and drifts."""
    wrong = (-0.2, -3.0, -1.5, -1.1)

    fault = faulty(answers(wrong, wrong, wrong, masked_by=GRAMMAR))

    assert fault.reason == "drift"


def test_missing_logprobs_are_recomputed_and_are_the_anchor(answers: Any) -> None:
    found = judged(answers(None, PI, PI))

    assert found.group.rows[0].logprobs == PI
    assert [row.trainable for row in found.group.rows] == [True] * 3
    assert found.answers == CheckedAnswers(recomputed=(0,), tokens=12)
    assert found.differences == [0.0] * 8, "nothing of it was recorded"


SHIFTED = tuple(value + 0.5 for value in PI)


def test_a_doubtful_answer_is_left_out(answers: Any) -> None:
    found = judged(answers(SHIFTED, PI, PI, PI))

    assert found.answers.left_out == {0: "drift"}
    assert found.answers.recomputed == ()
    assert found.differences == [0.0] * 12


def test_where_most_of_a_group_drifts_it_is_left_out(answers: Any) -> None:
    fault = faulty(answers(SHIFTED, SHIFTED, PI))

    assert fault.reason == "drift"
    assert fault.text.startswith("2 of 3 answers drift; answer 0: recorded and recomputed")


def test_a_foreign_token_id_masks_its_answer_alone(answers: Any) -> None:
    group = answers(PI, PI, PI, PI)

    foreign = Fault("token_out_of_vocabulary", "token id 48 is outside")
    found = judge_answers(group, {**values(group), 0: foreign}, settings())

    assert isinstance(found, Judged)
    assert found.answers.left_out == {0: "token_out_of_vocabulary"}
    found_advantages = [row.advantage for row in found.group.rows]
    assert found_advantages == pytest.approx([0.0, -1 / 6, 1 / 3, -1 / 6])
    assert not found.group.rows[0].counted


@pytest.mark.parametrize("why", ["drift", "token_out_of_vocabulary"])
def test_an_answer_that_is_left_out_has_no_part_in_the_reward_of_its_twin(why: str) -> None:
    """Rewards 0.9, 0.1, 0.5 and 0.2; the first two are the same text, and the second is left out.

    The mean of the others is 1.6 / 3.
    """
    made = [
        make_answer(place, token_ids=(5, 6, 7, 8 + max(0, place - 1)), logprobs=PI)
        for place in range(4)
    ]
    if why == "drift":
        made[1] = replace(made[1], logprobs=tuple(one - 2.0 for one in PI))
    (group,) = select_groups(
        [make_scored_group([0.9, 0.1, 0.5, 0.2], answers=made)], pack_tokens=100
    ).groups
    assert group.scores == (0.5, 0.5, 0.5, 0.2)

    computed: dict[int, Sequence[float] | Fault] = {**values(group)}
    if why != "drift":
        computed[1] = Fault(why, "token id 48 is outside")
    found = judge_answers(group, computed, settings())

    assert isinstance(found, Judged), found
    assert found.answers.left_out == {1: why}
    assert found.group.scores == (0.9, 0.1, 0.5, 0.2)
    assert [row.advantage for row in found.group.rows] == pytest.approx(
        [0.3667, 0.0, -0.0333, -0.3333], abs=1e-4
    )


def test_the_spread_is_that_of_the_rewards_without_a_twin_that_was_left_out() -> None:
    """0.9 and 0.1 shared 0.5; without the first all that is left is 0.1."""
    made = [
        make_answer(place, token_ids=(5, 6, 7, 8 + max(0, place - 1)), logprobs=PI)
        for place in range(4)
    ]
    made[0] = replace(made[0], logprobs=tuple(one - 2.0 for one in PI))
    (group,) = select_groups(
        [make_scored_group([0.9, 0.1, 0.1, 0.1], answers=made)], pack_tokens=100
    ).groups

    assert faulty(group).reason == "no_spread"


FLAT = (0.95, 0.51, 0.5, 0.5, 0.5, 0.505, 0.5, 0.5)
"""Without the first their deviation is 0.0036."""


@pytest.mark.parametrize(
    ("scores", "least", "reason"),
    [
        (FLAT, 0.02, "no_spread"),
        (FLAT, 0.003, None),  # a judge that is as sure as that
        ((0.95, *[0.5] * 7), 1e-6, "no_spread"),
        # Six of 0.5 and one of 0.57: 0.07 sqrt(6) / 7 = 0.0245.
        ((0.95, 0.57, *[0.5] * 6), 0.025, "within_noise"),
        ((0.95, 0.57, *[0.5] * 6), 0.024, None),
    ],
)
def test_the_spread_is_that_of_the_answers_that_are_left(
    answers: Any, scores: tuple[float, ...], least: float, reason: str | None
) -> None:
    group = replace(answers(SHIFTED, *[PI] * 7), scores=scores)

    found = judge_answers(group, values(group), settings(), least_spread=least)

    assert (found.reason if isinstance(found, Fault) else None) == reason
    if reason is not None and scores is FLAT:
        assert isinstance(found, Fault)
        assert found.text == (
            "the rewards of the 7 answers that count spread by 0.0036, least 0.0200"
        )


def test_the_gate_does_not_look_again_where_no_answer_left_the_baseline(answers: Any) -> None:
    group = replace(answers(*[PI] * 8), scores=FLAT)

    assert isinstance(judge_answers(group, values(group), settings(), least_spread=0.4), Judged)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_masks_its_answer_alone(answers: Any, value: float) -> None:
    group = answers(PI, None, PI, PI)
    computed = {**values(group), 0: (value, *PI[1:]), 1: (value, *PI[1:])}

    found = judge_answers(group, computed, settings())

    assert isinstance(found, Judged)
    assert found.answers.left_out == {0: "drift", 1: "logprobs_unknown"}


def test_a_group_without_a_trainable_answer_is_a_fault(answers: Any) -> None:
    group = answers(PI, PI)
    group = replace(group, rows=tuple(replace(row, trainable=False) for row in group.rows))

    assert isinstance(judge_answers(group, {}, settings()), Fault)


def test_no_difference_above_the_tolerance_is_untouched_and_a_negative_one_is() -> None:
    nan = math.nan

    assert untouched([0.0, 0.2, 0.21, -3.0, nan], 0.2) == (True, True, False, True, True)
    assert untouched([], 0.2) == ()
