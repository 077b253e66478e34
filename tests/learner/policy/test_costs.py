"""Which packs a group gets: by hand, and never dearer than its rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from learner.policy import costs
from learner.policy.architecture import Form
from learner.policy.costs import Prices, Sizes, cheapest, cost, prices
from learner.policy.packing import chain, fold, pack_group
from learner.records import TrainableRow, TrainingGroup
from tests.learner.conftest import make_group, make_row

SMOLLM2 = Sizes(layers=30, hidden=576, queries=576, keys=192, inner=1536)
OF = Prices(pair=0.01, segment=1.0, pack=20.0)


def test_a_pair_costs_its_share_of_the_operations() -> None:
    # 14 * 576 operations against 4 for each of 576 * (2 * 576 + 2 * 192 + 3 * 1,536) weights
    assert prices(SMOLLM2).pair == pytest.approx(14 * 576 / (4 * 576 * 6_144))


def test_the_cost_of_a_pack_by_hand() -> None:
    segments = fold([(1, 2, 3, 4), (1, 2, 5)]).segments  # 5 tokens, 3 + 6 + 3 + 1 pairs less 1

    assert cost(segments, OF, "segments") == pytest.approx(5 + 0.01 * (3 + 2 * 3 + 3 + 1) + 3 + 20)
    assert cost(segments, OF, "dense") == pytest.approx(5 + 0.01 * 25 + 3 + 20)
    # one row has the kernel's own causal mask in each form
    assert cost(chain(4), OF, "dense") == pytest.approx(4 + 0.01 * 10 + 1 + 20)


@pytest.mark.parametrize(
    ("prompt", "answers", "length", "form", "packs"),
    [
        (256, 8, 500, "segments", 1),
        (256, 8, 500, "varlen", 1),
        (256, 8, 500, "dense", 8),  # 4.0 s in one pack with a mask of 4,248 * 4,248, 2.1 s in rows
        (1_500, 8, 60, "dense", 1),
    ],
)
def test_rows_where_a_dense_mask_outweighs_the_prompt(
    prompt: int, answers: int, length: int, form: Form, packs: int
) -> None:
    rows = [make_row([number] * length) for number in range(answers)]
    members = make_group([99] * prompt, rows)

    found = cheapest(members, max_tokens=10_000, of=prices(SMOLLM2), form=form)

    assert len(found) == packs


def test_answers_that_share_little_are_not_cut_into_segments() -> None:
    other = make_row([20] * 32)
    few = make_group([1] * 40, [make_row([7, 8, *[9] * 30]), make_row([7, 8, *[10] * 30]), other])
    many = make_group(
        [1] * 40, [make_row([7] * 100 + [9] * 9), make_row([7] * 100 + [10] * 9), other]
    )

    (pack,) = cheapest(few, max_tokens=1_000, of=Prices(segment=5.0), form="segments")
    (shared,) = cheapest(many, max_tokens=1_000, of=Prices(segment=5.0), form="segments")

    assert [one.length for one in pack.segments] == [40, 31, 31, 31]
    assert [one.length for one in shared.segments] == [40, 100, 8, 8, 31]


@settings(max_examples=60)
@given(
    prompt=st.integers(1, 60),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    alike=st.integers(0, 30),
    max_tokens=st.integers(1, 300),
    form=st.sampled_from(["segments", "dense"]),
)
def test_it_is_never_dearer_than_rows_and_keeps_the_order(
    prompt: int, lengths: list[int], alike: int, max_tokens: int, form: Form
) -> None:
    rows = tuple(
        TrainableRow(
            token_ids=tuple([5] * min(alike, length) + [10 + place] * (length - alike)),
            logprobs=(-1.0,) * max(length, min(alike, length)),
            advantage=float(place),
            temperature=1.0,
            trainable=True,
        )
        for place, length in enumerate(lengths)
    )
    group = TrainingGroup(
        group_id="g", adapter="base", prompt_token_ids=(1,) * prompt, rows=rows, scores=()
    )

    found = cheapest(group, max_tokens=max_tokens, of=OF, form=form)

    alone = pack_group(group, max_tokens=max_tokens, alone=True)
    assert sum(cost(pack.segments, OF, form) for pack in found) <= sum(
        cost(pack.segments, OF, form) for pack in alone
    ) * (1 + 1e-9)
    assert [t for pack in found for t in pack.targets] == [t for r in rows for t in r.token_ids]
    longest = max(len(pack.input_ids) for pack in alone)
    assert all(len(pack.input_ids) <= max(max_tokens, longest) for pack in found)


def test_the_choice_for_the_same_answers_is_made_once() -> None:
    """With other advantages and kept tokens; not for fewer answers."""
    costs._chosen.cache_clear()
    answers = [[7, 8, 9], [7, 4], [5, 6]]
    one = make_group(range(3, 9), [make_row(each) for each in answers])
    kept = [False, True, True]
    other = make_group(
        range(3, 9), [make_row(each, 0.1, kept=kept[: len(each)]) for each in answers]
    )
    less = make_group(
        range(3, 9), [*(make_row(each) for each in answers[:2]), make_row([5, 6], trainable=False)]
    )

    packs = [
        cheapest(each, max_tokens=100, of=Prices(), form="segments") for each in (one, other, less)
    ]

    assert (costs._chosen.cache_info().hits, costs._chosen.cache_info().misses) == (1, 2)
    assert [len(pack.targets) for of_group in packs for pack in of_group] == [7, 4, 5]
    assert packs[1][0].advantages == (0.1,) * 4
