"""Which groups are trained on, by content, age and earlier failures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ingest.records import Rewarded
from learner.runs.selection import Selection, mask_reason, runs_between, select_groups
from learner.runs.source import SUSPECTS_KEPT, choose
from tests.learner.conftest import make_answer, make_scored_group


def select(*groups: Any, pack_tokens: int = 100) -> Selection:
    return select_groups(groups, pack_tokens=pack_tokens)


def test_a_good_group_carries_its_tokens_and_centred_scores() -> None:
    selection = select(make_scored_group([1.0, 0.0, 0.5, 0.5]))

    (group,) = selection.groups
    assert group.prompt_token_ids == (1, 2, 3)
    assert [row.advantage for row in group.rows] == [0.5, -0.5, 0.0, 0.0]
    assert group.rows[1].token_ids == (5, 6, 8)
    assert group.rows[1].logprobs == (-1.0, -2.0, -3.0)
    assert group.scores == (1.0, 0.0, 0.5, 0.5)
    assert not selection.dropped
    assert not selection.masked_answers


def test_a_masked_answer_has_no_part_in_the_loss_nor_in_the_baseline() -> None:
    answers = [make_answer(0, untrainable_reason="top_p"), make_answer(1), make_answer(2)]

    selection = select(make_scored_group([1.0, 0.0, 0.2], answers=answers))

    (group,) = selection.groups
    # mean = 0.2 / 2 = 0.1, without the masked answer's 1.0
    assert [row.advantage for row in group.rows] == pytest.approx([0.0, -0.1, 0.1])
    assert [row.trainable for row in group.rows] == [False, True, True]
    assert selection.masked_answers == {"top_p": 1}


@pytest.mark.parametrize("reason", ["lengths_differ", "logprob_not_finite"])
def test_an_answer_whose_logprobs_are_missing_is_left_to_the_trainer(reason: str) -> None:
    answers = [
        make_answer(0, untrainable_reason=reason, logprobs=(-1.0,)),
        make_answer(1),
        make_answer(2),
    ]
    scored = make_scored_group([1.0, 0.0, 0.2], answers=answers)

    selection = select_groups([scored], pack_tokens=100)
    (group,) = selection.groups
    assert [row.trainable for row in group.rows] == [True] * 3
    assert selection.masked_answers == {}
    assert [row.recorded for row in group.rows] == [False, True, True]
    assert group.rows[0].logprobs == (0.0, 0.0, 0.0)

    touched = select_groups(
        [replace(scored, group=replace(scored.group, masked_by="masked_by_tool_choice"))],
        pack_tokens=100,
    )
    assert touched.masked_answers == {reason: 1}, "which tokens the mask touched is not known"
    assert touched.groups[0].masked_by == "masked_by_tool_choice"


def test_what_was_damaged_in_the_store_is_not_recomputed() -> None:
    answers = [make_answer(0, logprobs=(-1.0,)), make_answer(1), make_answer(2)]

    selection = select_groups(
        [make_scored_group([1.0, 0.0, 0.2], answers=answers)],
        pack_tokens=100,
    )

    assert selection.masked_answers == {"tokens_without_logprobs": 1}


def test_one_good_answer_that_is_masked_pushes_nobody() -> None:
    """Seven equal answers beside a greedy one that is better have nothing to teach."""
    answers = [make_answer(0, temperature=0.0), *(make_answer(place) for place in range(1, 8))]

    selection = select(make_scored_group([0.95, *[0.5] * 7], answers=answers))

    assert list(selection.dropped.values()) == ["no_spread"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": (), "logprobs": ()}, "no_tokens"),
        ({"logprobs": (-1.0,)}, "tokens_without_logprobs"),
        ({"logprobs": (-1.0, -math.inf, -1.0)}, "non_finite_logprob"),
        ({"logprobs": (-1.0, 25.0, -1.0)}, "positive_logprob"),
        pytest.param({"logprobs": (-1.0, 1e-6, -1.0)}, None, id="over 0 by rounding"),
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": 0.009}, "temperature_raised"),
        ({"untrainable_reason": "penalties"}, "penalties"),
        pytest.param({"finish_reason": "length"}, None, id="cut by the length that was asked for"),
        ({}, None),
    ],
)
def test_an_answer_that_is_not_exact_is_masked(changes: dict[str, Any], reason: str | None) -> None:
    assert mask_reason(make_answer(0, **changes)) == reason


def test_each_useless_group_is_dropped_for_its_reason() -> None:
    greedy = [make_answer(0), make_answer(1, temperature=0.0)]
    groups = [
        make_scored_group([0.5], group_id="alone"),
        make_scored_group([0.5, math.nan], group_id="nan"),
        make_scored_group([0.7, 0.7], group_id="flat"),
        make_scored_group([0.70, 0.73], group_id="nearly flat"),  # deviation 0.015
        make_scored_group([0.0, 1.0], group_id="no prompt", prompt_token_ids=()),
        make_scored_group([0.0, 1.0], group_id="greedy", answers=greedy),
    ]

    selection = select(*groups)

    assert selection.groups == ()
    assert selection.dropped == {
        "alone": "too_few_answers",
        "nan": "non_finite_score",
        "flat": "no_spread",
        "nearly flat": "no_spread",
        "no prompt": "no_prompt",
        "greedy": "too_few_trainable",
    }
    assert selection.texts == {
        "alone": "it has 1 answer, and a comparison needs 2",
        "nan": "the score of answer 1 is nan; 1 of 2 answers can be trained on; "
        "masked: 1 non_finite_score",
        "flat": "least 0.0200",
        "nearly flat": "least 0.0200",
        "no prompt": "the token ids of its prompt were not recorded",
        "greedy": "1 of 2 answers can be trained on; masked: 1 greedy",
    }


def test_scores_just_spread_enough_are_kept() -> None:
    assert len(select(make_scored_group([0.70, 0.75])).groups) == 1  # deviation 0.025


def test_a_group_with_one_answer_too_long_is_dropped_whole() -> None:
    # prompt 3 + answer 3, whose last token is not computed: 5 tokens
    assert len(select(make_scored_group([0.0, 1.0]), pack_tokens=5).groups) == 1
    dropped = select(make_scored_group([0.0, 1.0]), pack_tokens=4)
    assert dropped.dropped == {"g": "too_long"}
    assert dropped.texts == {
        "g": "its prompt has 3 tokens and its longest answer 3; learner.pack_tokens is 4"
    }


def test_a_group_is_trained_on_by_its_rewards_and_not_by_its_scores() -> None:
    plain = make_scored_group([0.5, 0.5])
    rewarded = Rewarded(rewards=(0.25, 0.75), independent=(0.0, 1.0))

    chosen = select_groups([replace(plain, rewarded=rewarded)], pack_tokens=100)
    tied = select_groups(
        [replace(make_scored_group([0.1, 0.9]), rewarded=Rewarded(rewards=(0.5, 0.5)))],
        pack_tokens=100,
    )

    assert [row.advantage for row in chosen.groups[0].rows] == [-0.25, 0.25]
    assert chosen.groups[0].scores == (0.25, 0.75)
    assert tied.dropped == {"g": "no_spread"}


def test_a_group_of_identical_answers_is_dropped_for_it() -> None:
    """Also where feedback or a judge scored the same text differently."""
    same = [make_answer(place, token_ids=(5, 6, 7)) for place in range(4)]
    masked = [*same[:3], make_answer(3, token_ids=(8, 9, 10), untrainable_reason="top_p")]
    for answers in (same, masked):
        assert select(make_scored_group([1.0, 0.8, 0.2, 0.0], answers=answers)).dropped == {
            "g": "identical_answers"
        }


def test_identical_answers_share_their_mean_reward() -> None:
    """The mean of 1 and 0 is 0.5, as the two others have: nothing is left of the spread."""
    pair = [make_answer(place, token_ids=(5, 6, 7)) for place in range(2)]
    answers = [*pair, make_answer(2), make_answer(3)]
    assert select(make_scored_group([1.0, 0.0, 0.5, 0.5], answers=answers)).dropped == {
        "g": "no_spread"
    }

    (group,) = select(make_scored_group([1.0, 0.5, 0.25, 0.25], answers=answers)).groups
    assert group.scores == (0.75, 0.75, 0.25, 0.25)
    assert group.unshared == (1.0, 0.5, 0.25, 0.25)
    assert [row.advantage for row in group.rows] == [0.25, 0.25, -0.25, -0.25]


def test_one_text_beside_silence_is_learned_from() -> None:
    """All answers with tokens are pushed one way, so nothing cancels."""
    same = [make_answer(place, token_ids=(5, 6, 7)) for place in range(2)]
    silent = [make_answer(place, token_ids=(), logprobs=()) for place in (2, 3)]
    (group,) = select(make_scored_group([0.9, 0.7, 0.0, 0.0], answers=[*same, *silent])).groups
    assert [row.advantage for row in group.rows] == pytest.approx([0.4, 0.4, -0.4, -0.4])


def test_a_score_out_of_range_does_not_hide_in_a_mean() -> None:
    pair = [make_answer(place, token_ids=(5, 6, 7)) for place in range(2)]
    scored = make_scored_group([1.5, 0.3, 0.1], answers=[*pair, make_answer(2)])
    (group,) = select(scored).groups
    assert group.scores == (0.2, 0.3, 0.1)
    assert [row.advantage for row in group.rows] == pytest.approx([0.0, 0.1, -0.1])

    assert select(make_scored_group([0.1, 1.5], answers=pair)).dropped == {
        "g": "score_out_of_range"
    }


def test_silence_without_a_score_has_no_part_in_the_baseline() -> None:
    silent = make_answer(2, token_ids=(), logprobs=())
    (group,) = select(
        make_scored_group([1.0, 0.0, math.nan], answers=[*map(make_answer, (0, 1)), silent])
    ).groups
    assert [row.advantage for row in group.rows] == [0.5, -0.5, 0.0]


PARENTS = {"v1": "base", "v2": "v1", "v3": "v1", "v4": "v1", "v5": "v4"}
"""v2 and v3 lost their canaries."""


@pytest.mark.parametrize(
    ("left", "right", "runs"),
    [
        ("base", "base", 0),
        ("v1", "v1", 0),
        ("v1", "base", 1),
        ("v5", "v4", 1),
        ("v5", "v1", 2),  # and not 4: v2 and v3 changed nothing
        ("v5", "base", 3),
        ("v4", "v2", 2),  # up to v1 and down again
        ("base", "v5", 3),  # after a rollback to the base
    ],
)
def test_runs_are_counted_along_the_tree(left: str, right: str, runs: int) -> None:
    assert runs_between(PARENTS, left, right) == runs


@pytest.mark.parametrize("pair", [("v1", "gone"), ("gone", "v1")])
def test_an_unknown_version_has_no_distance(pair: tuple[str, str]) -> None:
    assert runs_between(PARENTS, *pair) is None


def test_a_circle_of_parents_ends() -> None:
    assert runs_between({"a": "b", "b": "a"}, "a", "base") is None


FRESH = [f"g{number}" for number in range(16)]


def test_without_failures_the_newest_are_taken() -> None:
    assert choose(FRESH, {}, least=4, most=6, after_failure=False) == (FRESH[:6], [])
    assert choose(FRESH, {}, least=17, most=6, after_failure=False) == ([], [])


def test_half_of_the_suspects_join_those_that_never_failed() -> None:
    failures = {"g0": 1, "g3": 1, "g5": 1, "g7": 2}

    taken, given_up = choose(FRESH, failures, least=4, most=8, after_failure=False)

    clean = [name for name in FRESH if name not in failures]
    assert taken == [*clean[:6], "g0", "g3"]
    assert given_up == []


def test_the_run_after_a_failure_leaves_suspects_out_if_enough_others_wait() -> None:
    failures = {"g0": 1}

    assert choose(FRESH, failures, least=16, most=64, after_failure=True)[0] == FRESH[1:]


def test_the_run_after_a_failure_takes_suspects_when_hardly_anything_else_waits() -> None:
    failures = dict.fromkeys(FRESH, 1)

    assert choose(FRESH, failures, least=16, most=64, after_failure=True)[0] == FRESH[:8]


@pytest.mark.parametrize("most", [1, 2, 64])
def test_a_lone_suspect_is_tried_alone_at_last(most: int) -> None:
    assert choose(["g0"], {"g0": 5}, least=1, most=most, after_failure=True)[0] == ["g0"]


def test_suspects_without_end_are_given_up_the_oldest_first() -> None:
    most = 2
    failures = dict.fromkeys(FRESH, 1)

    taken, given_up = choose(FRESH, failures, least=1, most=most, after_failure=True)

    assert given_up == FRESH[SUSPECTS_KEPT * most :]
    assert len(taken) == most
