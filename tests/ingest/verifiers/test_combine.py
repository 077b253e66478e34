"""The reward: numbers worked by hand, and rules that hold for any scores."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import assume, given, strategies as st

from ingest.verifiers.records import Checked, Failure, FailureReason, Finding
from ingest.verifiers.rewarding import FAIL_TOP, PASS_BOTTOM, combine, counted_scores, weighted_mean


def checked(
    *scores: float, name: str = "v", weight: float = 1.0, gate: bool = False, pass_at: float = 1.0
) -> Checked:
    return Checked(
        name=name,
        version="1",
        digest="d",
        weight=weight,
        gate=gate,
        pass_at=pass_at,
        results=tuple(Finding(score=score) for score in scores),
        scores=scores,
    )


def rewards(ruler: tuple[float, ...], *verifiers: Checked) -> tuple[float, ...]:
    return combine(ruler, verifiers).rewards


def test_weights_make_the_weighted_mean() -> None:
    made = combine(
        (0.8, 0.2),
        [checked(0.0, 1.0, weight=2.0), checked(1.0, 1.0, name="w", weight=1.0)],
    )

    # (1*0.8 + 2*0 + 1*1) / 4, (1*0.2 + 2*1 + 1*1) / 4
    assert made.rewards == pytest.approx((0.45, 0.8))
    # (2*0 + 1*1) / 3, (2*1 + 1*1) / 3
    assert made.independent == pytest.approx((1 / 3, 1.0))


def test_without_a_verifier_that_counts_the_reward_is_the_score() -> None:
    left_out = Checked(
        name="v",
        version="1",
        digest="d",
        weight=5.0,
        gate=False,
        pass_at=1.0,
        results=(Failure(reason="timeout", why="slow"), Finding(score=1.0)),
    )

    made = combine((0.31, 0.77), [left_out])

    assert made.rewards == (0.31, 0.77)
    assert made.independent == ()
    assert made.checks[0][0] == {
        "name": "v",
        "version": "1",
        "why": "slow",
        "score": None,
        "error": "timeout",
    }
    assert made.rule["verifiers"][0]["counts"] is False


def test_what_fails_a_gate_comes_below_all_that_pass_in_its_own_order() -> None:
    gate = checked(1.0, 0.0, 1.0, 0.9, gate=True)

    made = rewards((0.1, 1.0, 0.3, 0.5), gate)

    assert made == pytest.approx((0.64, 0.4, 0.72, 0.2))


def test_a_gate_passes_from_its_own_limit_on() -> None:
    gate = checked(0.5, 0.49, gate=True, pass_at=0.5)

    assert rewards((0.0, 1.0), gate) == (PASS_BOTTOM, FAIL_TOP)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_gate_that_tells_no_answer_apart_leaves_the_mean(score: float) -> None:
    assert rewards((0.2, 0.9), checked(score, score, gate=True)) == (0.2, 0.9)


def test_an_answer_that_fails_over_counts_as_wrong_only_under_fail() -> None:
    results = (Finding(score=1.0), Failure(reason="timeout"))

    assert counted_scores(results, "fail") == (1.0, 0.0)
    assert counted_scores(results, "ignore") == ()
    assert counted_scores(results, "hold") == ()


@pytest.mark.parametrize(
    "reason", ["not_loaded", "unreachable", "refused", "not_redacted", "too_large", "unreadable"]
)
def test_what_no_answer_can_bring_about_is_no_answers_fault(reason: FailureReason) -> None:
    assert counted_scores((Finding(score=1.0), Failure(reason=reason)), "fail") == ()


def test_a_verifier_that_does_not_apply_to_one_answer_counts_for_none() -> None:
    assert counted_scores((Finding(score=1.0), Finding(score=None)), "fail") == ()


SHARE = st.floats(0, 1)
WEIGHT = st.floats(0, 1000)


@st.composite
def groups(draw: st.DrawFn) -> tuple[tuple[float, ...], list[Checked]]:
    size = draw(st.integers(2, 8))
    column = st.tuples(*[SHARE] * size)
    verifiers = [
        checked(
            *draw(column),
            name=f"v{number}",
            weight=draw(WEIGHT),
            gate=draw(st.booleans()),
            pass_at=draw(st.floats(0.01, 1)),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    return draw(column), verifiers


@given(groups())
def test_rewards_are_shares_one_for_each_answer(
    group: tuple[tuple[float, ...], list[Checked]],
) -> None:
    ruler, verifiers = group

    made = combine(ruler, verifiers)

    assert len(made.rewards) == len(made.checks) == len(ruler)
    assert all(0.0 <= one <= 1.0 for one in (*made.rewards, *made.independent))


@given(groups())
def test_an_answer_that_is_nowhere_worse_is_not_ranked_lower(
    group: tuple[tuple[float, ...], list[Checked]],
) -> None:
    ruler, verifiers = group
    made = combine(ruler, verifiers).rewards

    for a, b in combinations(range(len(ruler)), 2):
        for low, high in ((a, b), (b, a)):
            columns = [ruler, *(one.scores for one in verifiers)]
            if all(column[low] <= column[high] for column in columns):
                assert made[low] <= made[high] + 1e-12


@given(groups(), st.data())
def test_a_better_score_never_costs_an_answer_reward(
    group: tuple[tuple[float, ...], list[Checked]], data: st.DataObject
) -> None:
    ruler, verifiers = group
    place = data.draw(st.integers(0, len(ruler) - 1))
    better = tuple(
        data.draw(st.floats(score, 1)) if i == place else score for i, score in enumerate(ruler)
    )
    improved = [
        checked(
            *(
                data.draw(st.floats(score, 1)) if i == place else score
                for i, score in enumerate(one.scores)
            ),
            name=one.name,
            weight=one.weight,
            gate=one.gate,
            pass_at=one.pass_at,
        )
        for one in verifiers
    ]

    before = combine(ruler, verifiers).rewards[place]
    after = combine(better, improved).rewards[place]

    assert after >= before - 1e-12


@given(groups())
def test_all_that_pass_the_gates_are_above_all_that_fail(
    group: tuple[tuple[float, ...], list[Checked]],
) -> None:
    ruler, verifiers = group
    gates = [one for one in verifiers if one.gate]
    passing = [all(one.scores[i] >= one.pass_at for one in gates) for i in range(len(ruler))]
    assume(len(set(passing)) == 2)

    made = combine(ruler, verifiers).rewards

    low = [reward for reward, passes in zip(made, passing, strict=True) if not passes]
    high = [reward for reward, passes in zip(made, passing, strict=True) if passes]
    assert max(low) <= FAIL_TOP < PASS_BOTTOM <= min(high)


@given(groups())
def test_gates_keep_the_judges_order_within_each_kind(
    group: tuple[tuple[float, ...], list[Checked]],
) -> None:
    ruler, verifiers = group
    gates = [one for one in verifiers if one.gate]
    passing = [all(one.scores[i] >= one.pass_at for one in gates) for i in range(len(ruler))]

    made = combine(ruler, gates).rewards

    for a, b in combinations(range(len(ruler)), 2):
        if passing[a] == passing[b] and ruler[a] <= ruler[b]:
            assert made[a] <= made[b]


@given(st.lists(st.tuples(SHARE, WEIGHT), min_size=1, max_size=6))
def test_the_mean_is_that_of_exact_fractions(pairs: list[tuple[float, float]]) -> None:
    from fractions import Fraction

    scores, weights = zip(*pairs, strict=True)
    total = sum(map(Fraction, weights))
    found = weighted_mean(scores, weights)
    if sum(weights) == 0:
        assert found is None
        return
    exact = sum(Fraction(s) * Fraction(w) for s, w in pairs) / total
    assert found == pytest.approx(float(exact), abs=1e-9)
